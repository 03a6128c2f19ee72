"""The diffusion rollout protocol, generated from proto/."""
