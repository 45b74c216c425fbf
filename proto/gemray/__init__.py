"""The gRPC interface of gemray: one package a version."""
