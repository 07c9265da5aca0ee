"""`ensure_persia_service`: a whole job on this machine, for tests of programs."""

import pytest
import torch

from karvan import distributed

pytest.importorskip("cloudpickle")


def send_five():
    import numpy as np
    from persia.ctx import DataCtx
    from persia.embedding.data import IDTypeFeature, Label, PersiaBatch

    with DataCtx() as ctx:
        for number in range(5):
            ages = [np.array([number, 7], np.uint64)]
            ctx.send_data(
                PersiaBatch([IDTypeFeature("age", ages)], labels=[Label(np.ones((1, 1), np.float32))])
            )


@pytest.mark.slow
def test_a_trainer_in_this_process_gets_the_batches_of_a_function():
    from persia.ctx import TrainCtx
    from persia.data import DataLoader, StreamingDataset
    from persia.embedding.optim import Adam
    from persia.helper import ensure_persia_service

    net = torch.nn.Linear(8, 1)
    distributed.disconnect()  # an earlier context of the process does not decide where rows are
    with (
        ensure_persia_service(
            data_loader_func=send_five,
            embedding_config={"slots_config": {"age": {"dim": 8}}},
            embedding_parameter_replica_num=2,
        ),
        TrainCtx(
            embedding_optimizer=Adam(), dense_optimizer=torch.optim.SGD(net.parameters(), lr=0.1)
        ) as ctx,
    ):
        count = 0
        for data in DataLoader(StreamingDataset(15), embedding_staleness=1):
            _, (age,), labels = ctx.prepare_features(data)
            ctx.backward(torch.nn.functional.mse_loss(net(age), labels[0]))
            count += 1
        assert count == 5
        assert sum(ctx.get_embedding_size()) == 6
        assert len(ctx.get_embedding_size()) == 2


def test_exactly_one_embedding_configuration_is_expected():
    from persia.helper import ensure_persia_service

    with pytest.raises(ValueError, match="got both or none"):
        ensure_persia_service()
