"""Agents on all hosts: started, met, refused with a reason."""
