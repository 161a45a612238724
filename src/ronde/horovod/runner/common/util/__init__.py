"""The launcher's odds and ends, those that scripts import."""
