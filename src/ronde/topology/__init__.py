"""What a machine is made of and how its parts are connected."""
