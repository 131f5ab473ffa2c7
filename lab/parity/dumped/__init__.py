"""Hidden states that another engine dumped, held against ours layer by layer: `eagle3lab inspect states`.

`files` reads what vLLM, speculators and SpecForge write, `boundaries` computes the same tokens with this engine and
with Hugging Face, `fit` says which of our states a dumped one is, `report` judges; `recorded` takes files of recorded
stages, which have the draft's too. Only `lab.cli` and tests import
this; another form of file is one more reader in `files`.
"""
