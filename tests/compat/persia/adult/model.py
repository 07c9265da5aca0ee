"""The net of PERSIA's Adult example."""

import torch
from torch import nn


class DNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense_mlp = nn.Linear(5, 16)
        self.dense_bn = nn.BatchNorm1d(16)
        self.sparse_mlp = nn.Linear(64, 128)
        self.sparse_bn = nn.BatchNorm1d(128)
        self.layers = nn.Sequential(nn.Linear(144, 256), nn.Linear(256, 128), nn.Linear(128, 1), nn.Sigmoid())

    def forward(self, non_id_tensors: list[torch.Tensor], embedding_tensors: list[torch.Tensor]):
        sparse = self.sparse_bn(self.sparse_mlp(torch.cat(embedding_tensors, dim=1).float()))
        dense = self.dense_bn(self.dense_mlp(non_id_tensors[0]))
        return self.layers(torch.cat([sparse, dense], dim=1))
