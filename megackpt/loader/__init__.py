"""Loading: ``load_operation`` has the stages of a load, ``metadata`` reads by one process alone.

``regions`` reads without a model, and without torch.
"""
