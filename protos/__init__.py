"""The contract: gRPC services, shared-memory layout, configuration. Imports nothing of ours."""
