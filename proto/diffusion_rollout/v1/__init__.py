"""Version 1 of the protocol: `rollout_pb2`, `policy_pb2`, `tensor_pb2` and their gRPC stubs."""
