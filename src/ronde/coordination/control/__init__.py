"""The control plane: messages between coordinators, apart from all data."""
