"""Statistics that the engine finds in data, and where they are kept."""

import numpy as np
import pytest
import torch
from feature_helpers import same

from karvan.features import Feature, FeatureEngine


def test_fit_finds_mean_and_standard_deviation_over_all_batches_without_nan():
    values = torch.randn(1000, dtype=torch.float64) * 7 + 1e6
    values[::10] = float("nan")
    engine = FeatureEngine(
        [Feature("p").normalise(), Feature("q").select("p").clip(0, 1), Feature("r").log1p().normalise()]
    )
    engine.fit({"p": part, "r": part.abs()} for part in values.split(77))
    known = values[~values.isnan()].numpy()
    statistics = engine.get_extra_state().numpy()
    np.testing.assert_allclose(statistics[0, 0], known.mean(), rtol=1e-12)
    # A mean 1e5 times the deviation costs five digits; sums of squares would cost ten.
    np.testing.assert_allclose(statistics[0, 1], known.std(), rtol=1e-9)
    np.testing.assert_allclose(statistics[1], [np.log1p(known).mean(), np.log1p(known).std()], rtol=1e-9)
    made = engine({"p": values, "r": values})["p"]
    assert abs(float(made.nanmean())) < 1e-6


def test_statistics_are_part_of_the_state_dict_and_not_of_the_modules_type():
    engine = FeatureEngine([Feature("p").normalise()]).fit([{"p": torch.rand(100) + 5}])
    model = torch.nn.Sequential(FeatureEngine([Feature("p").normalise()]))
    model.load_state_dict({f"0.{k}": v for k, v in engine.state_dict().items()})
    model.half()
    x = {"p": torch.rand(9)}
    assert same(model(x)["p"], engine(x)["p"])
    unfitted = FeatureEngine([Feature("p").normalise()])
    fresh = FeatureEngine([Feature("p").normalise()])
    fresh.load_state_dict(unfitted.state_dict())
    with pytest.raises(ValueError, match="Feature 'p', normalise: there are no statistics yet"):
        fresh(x)
    with pytest.raises(ValueError, match=r"statistics of shape \(0, 2\).* received \(1, 2\)"):
        FeatureEngine([Feature("p")]).load_state_dict(engine.state_dict())


def test_a_constant_column_becomes_zeros():
    engine = FeatureEngine([Feature("p").normalise()]).fit([{"p": torch.full((5,), 3.0)}])
    assert engine({"p": torch.full((2,), 3.0)})["p"].tolist() == [0, 0]


def test_what_cannot_be_fitted_is_an_error():
    x = [{"p": torch.rand(5)}]
    with pytest.raises(ValueError, match="but there is none"):
        FeatureEngine([Feature("p").normalise(0, 1)]).fit(x)
    with pytest.raises(ValueError, match="Feature 'p' has two normalise"):
        FeatureEngine([Feature("p").normalise().normalise()]).fit(x)
    with pytest.raises(ValueError, match="Feature 'q', normalise: cannot be fitted"):
        FeatureEngine([Feature("p").normalise(), Feature("q").select("p").normalise()]).fit(x)
    with pytest.raises(ValueError, match="Feature 'p', normalise: expected values to fit"):
        FeatureEngine([Feature("p").normalise()]).fit([])
