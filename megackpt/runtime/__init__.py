"""Run time: the four doors to the outside (other ranks, the disk, the device, later); nobody else goes through them."""
