"""Checkpoints: their files (`files`, `headers`, `hub`), their tensors (`reading`), and their way into a network."""
