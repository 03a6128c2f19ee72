"""Loading pipelines, what the service knows of their families, and the embedded model."""
