"""Saving: ``save_operation`` has the steps of a save, ``request`` what one rank asks for."""

from megackpt.saver.save_operation import save as save
