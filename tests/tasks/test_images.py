"""The image task: who holds what, what nobody holds, the order of batches, and the score."""

from itertools import chain, combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nestling.config.schema import TaskConfig
from nestling.core.errors import ConfigError
from nestling.models.pretrain import _scaled
from nestling.tasks import images
from nestling.tasks.augment import crop_flip, draws
from nestling.tasks.data import Images
from nestling.tasks.images import ImageTask, Score, make_task

N = 600


def tagged(count: int, first: int = 0) -> Images:
    """Images that carry their own number in two pixels."""
    number = np.arange(first, first + count)
    x = np.stack([number // 256, number % 256], 1).astype(np.uint8).reshape(count, 1, 1, 2)
    return Images(x, (number * 7 % 10).astype(np.int64))


def numbers(batch: Tensor) -> list[int]:
    """The numbers of scaled images."""
    pixels = (batch.reshape(-1, 2).double() * 255).round().long()
    return (256 * pixels[:, 0] + pixels[:, 1]).tolist()


@pytest.fixture(params=[False, True], ids=["one part", "own test part"])
def own_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    test = tagged(50, first=10_000) if request.param else None
    monkeypatch.setattr(images, "load_images", lambda name, path: (tagged(N), test))
    return request.param


class Remember(nn.Module):
    """Notes what it is shown and always guesses class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += numbers(x)
        return torch.eye(10)[torch.zeros(len(x), dtype=torch.long)]


def held_out(task: ImageTask) -> list[int]:
    model = Remember()
    assert task.evaluate(model).items == len(model.seen) == task.held_out_items
    return model.seen


def owned(task: ImageTask, client: int | None) -> list[int]:
    return [n for x, _ in task.batches(client, size=64, seed=0, epoch=0) for n in numbers(x)]


CONFIGS = [TaskConfig(clients=7), TaskConfig(clients=7, partition="iid"), TaskConfig(clients=3, alpha=100.0)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", [0, 5])
def test_every_item_is_with_one_client_or_held_out(own_test, config, seed) -> None:
    tasks = [
        make_task(TaskConfig(**{**vars(config), "evaluate_on": part}), seed=seed) for part in ("test", "validation")
    ]
    test, validation = held_out(tasks[0]), held_out(tasks[1])
    by_client = [owned(tasks[0], client) for client in tasks[0].clients()]
    assert [owned(tasks[1], client) for client in tasks[1].clients()] == by_client  # whatever it is judged on
    clients = list(chain.from_iterable(by_client))
    groups = [set(test), set(validation), set(clients)]
    assert not any(a & b for a, b in combinations(groups, 2))
    assert len(test) + len(validation) + len(clients) == len(set.union(*groups)) == N + 50 * own_test
    assert sorted(clients) == sorted(owned(tasks[0], None))
    assert [tasks[0].examples(c) for c in tasks[0].clients()] == [len(items) for items in by_client]
    assert tasks[0].examples(None) == len(tasks[0]) == len(clients)
    assert len(test) == (50 if own_test else N // 5)
    assert len(validation) == N // 10


def test_what_is_held_out_does_not_depend_on_the_run(own_test) -> None:
    for part in ("test", "validation"):
        wanted = held_out(make_task(TaskConfig(evaluate_on=part), seed=0))
        for config, seed in ((TaskConfig(evaluate_on=part), 9), (TaskConfig(evaluate_on=part, clients=3), 0)):
            assert held_out(make_task(config, seed=seed)) == wanted


def test_the_seed_decides_the_partition(own_test) -> None:
    def shares(seed: int) -> list[list[int]]:
        task = make_task(TaskConfig(clients=4, alpha=1.0), seed=seed)
        return [owned(task, client) for client in task.clients()]

    assert shares(1) == shares(1)
    assert shares(1) != shares(2)


def test_labels_stay_with_their_images(own_test) -> None:
    task = make_task(TaskConfig(clients=3), seed=0)
    for client in (None, *task.clients()):
        for x, y in task.batches(client, size=32, seed=1, epoch=0):
            assert y.tolist() == [n * 7 % 10 for n in numbers(x)]
            assert y.dtype == torch.int64
            assert x.dtype == torch.float32


@pytest.fixture
def task() -> ImageTask:
    return ImageTask(
        tagged(100), tagged(30, first=1000), [np.arange(40), np.arange(40, 100), np.arange(0)], classes=10, device="cpu"
    )


@given(size=st.integers(1, 70), client=st.sampled_from([0, 1, None]), seed=st.integers(0, 2**64 - 1))
def test_an_epoch_shows_each_item_once(size: int, client: int | None, seed: int) -> None:
    task = ImageTask(tagged(100), tagged(5), [np.arange(40), np.arange(40, 100)], classes=10, device="cpu")
    batches = [numbers(x) for x, _ in task.batches(client, size=size, seed=seed, epoch=2)]
    assert all(len(batch) == size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= size
    wanted = {0: range(40), 1: range(40, 100), None: range(100)}[client]
    assert sorted(chain.from_iterable(batches)) == list(wanted)


def test_the_order_depends_on_seed_client_and_epoch_only(task) -> None:
    def order(client: int | None, *, size: int = 16, seed: int = 3, epoch: int = 0) -> list[int]:
        return [n for x, _ in task.batches(client, size=size, seed=seed, epoch=epoch) for n in numbers(x)]

    first = order(0)
    torch.rand(1)
    np.random.rand(1)
    assert order(0) == order(0, size=5) == first
    assert first != list(range(40))
    assert len({tuple(o) for o in (first, order(0, seed=4), order(0, epoch=1), order(0, epoch=7))}) == 4
    task._shares[1] = np.arange(40)  # the same items, but another client's
    assert sorted(order(1)) == sorted(first)
    assert order(1) != first


def test_a_client_without_items_has_no_batches(task) -> None:
    assert task.clients() == [0, 1, 2]
    assert task.examples(2) == 0
    assert list(task.batches(2, size=8, seed=0, epoch=0)) == []


def test_pixels_run_from_zero_to_one_as_the_base_was_trained() -> None:
    x = np.array([[[[0, 51, 255]]]], np.uint8)
    task = ImageTask(Images(x, np.zeros(1, np.int64)), tagged(1), [np.arange(1)], classes=10, device="cpu")
    [(batch, _)] = task.batches(0, size=1, seed=0, epoch=0)
    assert batch.reshape(-1).tolist() == [0, float(np.float32(0.2)), 1]
    assert torch.equal(batch, _scaled(x))
    assert x.reshape(-1).tolist() == [0, 51, 255]


def test_the_score_counts_right_answers(task) -> None:
    model = Remember().train()
    score = task.evaluate(model)
    assert score == Score(sum(n * 7 % 10 == 0 for n in range(1000, 1030)), 30)
    assert score.accuracy == pytest.approx(0.1)
    assert not model.training
    many = ImageTask(tagged(1), tagged(700), [np.arange(1)], classes=10, device="cpu")
    assert held_out(many) == list(range(700))  # more than one batch


def test_evaluation_makes_no_graph(task) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 10))
    task.evaluate(model)
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


def test_the_loss_is_mean_cross_entropy(task) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 10))
    [batch, *_] = task.batches(0, size=4, seed=0, epoch=0)
    p = torch.softmax(model(batch[0]).double(), 1)[torch.arange(4), batch[1]]
    assert float(task.loss(model, batch).detach()) == pytest.approx(float(-p.log().mean().detach()), rel=1e-5)


def test_more_clients_than_items_are_refused(own_test) -> None:
    most = N - N // 10 - (0 if own_test else N // 5)
    assert len(make_task(TaskConfig(clients=most, partition="iid"), seed=0).clients()) == most
    with pytest.raises(ConfigError, match=rf"task\.clients: {most + 1} clients for {most} items"):
        make_task(TaskConfig(clients=most + 1), seed=0)


def test_the_digits_as_they_are() -> None:
    task = make_task(TaskConfig(data="digits", clients=8), seed=0)
    assert (len(task), task.held_out_items, task.classes) == (3500, 1000, 10)
    assert make_task(TaskConfig(evaluate_on="validation"), seed=0).held_out_items == 500


def coloured(count: int) -> Images:
    x = np.random.default_rng(0).integers(1, 256, (count, 3, 12, 12), dtype=np.uint8)
    return Images(x, np.arange(count) % 10)


def augmented(augment: bool) -> ImageTask:
    shares = [np.arange(40), np.arange(40, 100)]
    return ImageTask(coloured(100), coloured(30), shares, classes=10, device="cpu", augment=augment)


@pytest.mark.parametrize("client", [0, 1, None])
def test_augmented_batches_are_the_plain_ones_moved(client) -> None:
    """Items, labels and order stay, whatever the size of a batch; the pixels are those of the definition."""
    plain = list(augmented(False).batches(client, size=200, seed=3, epoch=1))
    drawn = draws(len(plain[0][1]), seed=3, client=client, epoch=1)
    wanted = crop_flip((plain[0][0] * 255).round().byte().numpy(), drawn)
    for size in (1, 7, 200):
        batches = list(augmented(True).batches(client, size=size, seed=3, epoch=1))
        assert torch.cat([y for _, y in batches]).tolist() == plain[0][1].tolist()
        assert torch.equal(torch.cat([x for x, _ in batches]), _scaled(wanted))
    assert not np.array_equal(wanted, (plain[0][0] * 255).round().byte().numpy())


def test_items_are_moved_otherwise_in_each_epoch_and_stay_as_they_are() -> None:
    task = augmented(True)
    before = task.digest
    epochs = [torch.cat([x for x, _ in task.batches(0, size=16, seed=0, epoch=epoch)]) for epoch in (0, 1, 0)]
    assert torch.equal(epochs[0], epochs[2])
    assert {image.numpy().tobytes() for image in epochs[0]} != {image.numpy().tobytes() for image in epochs[1]}
    assert task.digest == before == augmented(False).digest


def test_what_is_judged_is_never_moved() -> None:
    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.equal(x, _scaled(coloured(30).x))
            return torch.zeros(len(x), 10)

    augmented(True).evaluate(Keep())


def test_the_setting_reaches_the_task(own_test) -> None:
    assert make_task(TaskConfig(data="cifar10", augment="crop-flip"), seed=0).augment
    assert not make_task(TaskConfig(data="cifar10"), seed=0).augment


def test_where_all_items_are_one_clients_nothing_else_is_changed() -> None:
    task = augmented(True)
    whole = task.whole(1)
    assert whole.clients() == task.clients()
    assert [whole.examples(client) for client in whole.clients()] == [
        100 if client == 1 else 0 for client in task.clients()
    ]
    assert whole.augment
    assert (whole.classes, whole.device, whole.held_out_items) == (task.classes, task.device, task.held_out_items)
