"""gRPC: servicers, request parsing, events and errors."""
