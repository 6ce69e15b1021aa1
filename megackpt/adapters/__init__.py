"""Tensors of modules, optimizers, DTensors and Hugging Face models, declared as shards."""
