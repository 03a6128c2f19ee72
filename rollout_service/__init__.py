"""A gRPC service that samples diffusion and flow-matching models for RL, one streamed step at a time."""
