"""Models: a checkpoint becomes batched forward passes. Nothing here knows a dataset, a metric or a sampler.

What a model is: `families`, `layouts`, `places`, `facts`, `description`; what it weighs: `memory`.
From files to a network: `loading`, and `checkpoints`, which reads, checks, places and fetches tensors.
From requests to predictions: `base`, `transformer`, `cache`, `attention`, `visibility`, `readout`, `text`.
"""
