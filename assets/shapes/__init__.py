"""The *shapes* world: captions, renders, held-out splits and the models trained on them."""
