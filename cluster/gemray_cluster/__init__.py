"""The control plane of gemray: CLI, Ray coordinator, gRPC server, text. Holds no tensors."""
