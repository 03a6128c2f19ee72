"""The engine: one process per device that runs pipelines as coroutines and merges their denoiser calls."""
