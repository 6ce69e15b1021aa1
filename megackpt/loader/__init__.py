"""Loading: ``load_operation`` has the steps of a load, ``metadata`` reads by one process alone.

``regions`` reads without a model, and without torch.
"""
