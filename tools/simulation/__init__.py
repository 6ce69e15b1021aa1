"""The parts of simulate.py: the model, the save and the load, the report, and the charts."""
