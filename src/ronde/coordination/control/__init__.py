"""The control plane: messages between coordinators, separate from tensor data."""
