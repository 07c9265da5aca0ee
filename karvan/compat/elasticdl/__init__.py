"""The names of ElasticDL, over Karvan: the model contract, its commands, data readers, and the PS client.

`karvan run --as elasticdl train --model_zoo … --model_def …` runs a model that is written for ElasticDL, and
`karvan run --as elasticdl program.py` a program. Models are those of PyTorch. The package's own names are in
`elasticdl.toml`.
"""
