"""Run time: the four doors to the outside (other ranks, the disk, the device, later). Nobody else touches what is behind them."""
