"""Saving: ``save_operation`` has the stages of a save, ``save_request`` the request of one rank."""

from megackpt.saver.save_operation import save as save
