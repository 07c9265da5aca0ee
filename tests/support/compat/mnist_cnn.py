"""The MNIST CNN of ElasticDL's design for PyTorch, with its slips mended.

As written it runs nowhere: `super(Net, self)` in `CustomModel`, `tf.reshape` of labels, a bracket after the
loss, an `optimizer` of a `cnn` that does not exist, nothing returned in `Mode.PREDICTION`, steps of 784
numbers through records of 785, and images of (28, 28) for a convolution of one channel.
"""

import torch
from elasticdl.python.common.constants import Mode
from torch import nn


class CustomModel(nn.Module):
    def __init__(self):
        super(CustomModel, self).__init__()  # noqa: UP008
        self.conv1 = nn.Sequential(  # input shape (1, 28, 28)
            nn.Conv2d(
                in_channels=1,  # input height
                out_channels=16,  # n_filters
                kernel_size=5,  # filter size
                stride=1,  # filter movement/step
                padding=2,  # keeps width and length: (kernel_size - 1) / 2 if stride=1
            ),  # output shape (16, 28, 28)
            nn.ReLU(),  # activation
            nn.MaxPool2d(kernel_size=2),  # choose max value in 2x2 area, output shape (16, 14, 14)
        )
        self.conv2 = nn.Sequential(  # input shape (16, 14, 14)
            nn.Conv2d(16, 32, 5, 1, 2),  # output shape (32, 14, 14)
            nn.ReLU(),  # activation
            nn.MaxPool2d(2),  # output shape (32, 7, 7)
        )
        self.out = nn.Linear(32 * 7 * 7, 10)  # fully connected layer, output 10 classes

    def forward(self, x):
        x = self.conv1(x)
        x = self.conv2(x)
        x = x.view(x.size(0), -1)  # flatten the output of conv2 to (batch_size, 32 * 7 * 7)
        output = self.out(x)
        return output


def loss(labels, predictions):
    labels = labels.reshape([-1]).long()
    func = nn.CrossEntropyLoss()
    return func(predictions, labels)


def optimizer(model, lr=0.003):
    return torch.optim.Adam(model.parameters(), lr)


def dataset_fn(data_list, mode, _):
    feature_list = []
    label_list = []
    if mode == Mode.PREDICTION:
        while len(data_list) != 0:
            feature_list.append(data_list[: 28 * 28].reshape((1, 28, 28)))
            label_list.append(data_list[28 * 28 : 28 * 28 + 1])
            data_list = data_list[28 * 28 + 1 :]
        return feature_list
    else:
        while len(data_list) != 0:
            feature_list.append(data_list[: 28 * 28].reshape((1, 28, 28)))
            label_list.append(data_list[28 * 28 : 28 * 28 + 1])
            data_list = data_list[28 * 28 + 1 :]
        return feature_list, label_list


def eval_metrics_fn():
    return {"accuracy": lambda labels, predictions: predictions.argmax(1) == labels.reshape([-1])}
