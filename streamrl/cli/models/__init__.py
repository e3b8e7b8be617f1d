"""`streamrl get-model`: a pretrained model as a folder, from wherever it is to be had."""
