"""The parts of simulate.py: the model, the save and the load, what is told, and the plot."""
