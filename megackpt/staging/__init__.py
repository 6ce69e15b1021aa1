"""Device to host copies for a save, host to device for a load, buffers and their memory cap."""
