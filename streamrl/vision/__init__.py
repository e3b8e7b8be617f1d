"""Images and video frames of a vision-language model, treated the same in generators and learner.

    parts.py      content parts of messages -> media -> pixels, under limits
    patches.py    pixels -> what the vision tower takes, by the model's image processor
    tower.py      patches and token ids -> embeddings and positions, by the model
    families.py   which models have a vision tower, and how to load them
    places.py     where the media stand among token ids

Invariant: what a model sees of a medium depends only on the medium's bytes and the model's folder,
so the learner computes log-probabilities for the very input that was sampled from.
"""
