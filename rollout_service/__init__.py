"""A gRPC service that samples diffusion and flow-matching models for RL, one streamed step at a time."""

from importlib.metadata import version

__version__ = version("diffusion-rollout")
