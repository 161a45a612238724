"""The launcher's odds and ends, those that tests import."""
