# SPDX-License-Identifier: Apache-2.0
"""Plans: what a file may say, what it may not, and what fits a model."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_hips.comm.plan import EXACT, TOPOLOGIES, Choice, Plan, read_lines
from tf_hips.errors import ConfigError

ONEBIT = "error_feedback(onebit)"
PLAN = Plan(
    4,
    (
        Choice("conv, first: 1", 300, predicted_seconds=1e-05),
        Choice("dense", 2**24, ONEBIT, "ring", 16, 0.25),
        Choice("nothing", 0),
    ),
    0.375,
    {"profile": "p.yaml", "made": "2026-11-22"},
)
CHOICE = "name: a, num_elements: 5"

names = st.text(max_size=12)
choices = st.builds(
    Choice,
    name=names,
    num_elements=st.integers(0, 2**48),
    partitions=st.integers(1, 65536),
    predicted_seconds=st.none() | st.floats(0, 1e300),
) | st.builds(
    Choice,
    name=names,
    num_elements=st.integers(0, 2**48),
    compression=st.sampled_from(["onebit", ONEBIT, "terngrad(bitwidth=4)"]),
    topology=st.sampled_from([one for one in TOPOLOGIES if one != EXACT]),
)


def written(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@given(
    plan=st.builds(
        Plan,
        num_ranks=st.integers(1, 1000),
        choices=st.lists(choices, max_size=4).map(tuple),
        predicted_seconds=st.none() | st.floats(0, 1e300),
        facts=st.dictionaries(names, names, max_size=2),
    )
)
def test_what_is_written_is_read(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "hypothesis.yaml"
    plan.write(path)
    assert Plan.read(path) == plan


def test_a_plan_reads_well(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    PLAN.write(path)
    assert path.read_text().splitlines() == [
        "version: 1",
        "num_ranks: 4",
        "choices:",
        "- {name: 'conv, first: 1', num_elements: 300, compression: null, topology: allreduce, "
        "partitions: 1, predicted_seconds: 1.0e-05}",
        "- {name: dense, num_elements: 16777216, compression: error_feedback(onebit), "
        "topology: ring, partitions: 16, predicted_seconds: 0.25}",
        "- {name: nothing, num_elements: 0, compression: null, topology: allreduce, "
        "partitions: 1, predicted_seconds: null}",
        "predicted_seconds: 0.375",
        "facts:",
        "  profile: p.yaml",
        "  made: '2026-11-22'",
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_texts_of_compressors_become_canonical() -> None:
    assert Choice("a", 5, " error_feedback( onebit )", "ps").compression == ONEBIT


HEAD = "version: 1\nnum_ranks: 2\n"
WRONG = {
    "empty": ("", r"expected a mapping with `version: 1`\. Received: \{\}"),
    "a list": ("- 1\n", r"expected a mapping with `version: 1`\. Received: \[1\]"),
    "no version": ("num_ranks: 2\n", "expected a mapping with `version: 1`"),
    "a later version": ("version: 2\n", r"`version` must be 1\. Received: 2"),
    "a true version": ("version: true\n", r"`version` must be 1\. Received: True"),
    "no YAML": ("version: [1\n", "is not valid YAML"),
    "two documents": (HEAD + "choices: []\n---\n" + HEAD, "is not valid YAML"),
    "an object of Python": ("version: !!python/object/apply:os.abort []\n", "is not valid YAML"),
    "an impossible date": (HEAD + "choices: 2026-99-99\n", "is not valid YAML: ValueError"),
    "endless digits": ("version: " + "9" * 5000 + "\n", "is not valid YAML: ValueError"),
    "endless hexadecimal": (
        f"version: 1\nnum_ranks: 0x{'f' * 9000}\nchoices: []\n",
        r"plan\.yaml: `num_ranks` must be an integer in .*\. Received: a value of type int",
    ),
    "a huge second": (
        f"{HEAD}choices: []\npredicted_seconds: 0x{'f' * 9000}\n",
        "`predicted_seconds` must be finite",
    ),
    "deep": ("[" * 1500, "is not valid YAML: RecursionError"),
    "unknown key": (HEAD + "choices: []\nchoises: []\n", r"`choises`\. Did you mean `choices`\?"),
    "a key of numbers": (HEAD + "choices: []\n7: 8\n", "unknown key `7`"),
    "no choices": (HEAD, "lacks the key `choices`"),
    "choices are a text": (
        HEAD + "choices: none\n",
        "`choices` must be of type list. Rec.* 'none'",
    ),
    "a choice is a number": (HEAD + "choices: [3]\n", r"a mapping at `choices\[0\]`\. Received: 3"),
    "no ranks": ("version: 1\nnum_ranks: 0\nchoices: []\n", "`num_ranks` must be .*Received: 0"),
    "half a rank": ("version: 1\nnum_ranks: 1.5\nchoices: []\n", "of type int. Received: 1.5"),
    "a choice lacks its size": (
        HEAD + "choices: [{name: a}]\n",
        r"`choices\[0\]` lacks the key `num_elements`",
    ),
    "a negative size": (
        HEAD + "choices: [{name: a, num_elements: -1}]\n",
        r"at `choices\[0\]`: `num_elements` must be an integer in \[0, .*Received: -1",
    ),
    "no partitions": (
        HEAD + f"choices: [{{{CHOICE}}}, {{{CHOICE}, partitions: 0}}]\n",
        r"at `choices\[1\]`: `partitions` must be an integer in \[1, 65536\]\. Received: 0",
    ),
    "unknown topology": (
        HEAD + f"choices: [{{{CHOICE}, compression: onebit, topology: tree}}]\n",
        r"`topology` must be one of allreduce, ps, .*\. Received: 'tree'",
    ),
    "compressed allreduce": (
        HEAD + f"choices: [{{{CHOICE}, compression: onebit}}]\n",
        'must be "allreduce" if and only if `compression` is null',
    ),
    "an exact ring": (
        HEAD + f"choices: [{{{CHOICE}, topology: ring}}]\n",
        'must be "allreduce" if and only if `compression` is null',
    ),
    "unknown compressor": (
        HEAD + f"choices: [{{{CHOICE}, compression: onebti, topology: ps}}]\n",
        r"at `choices\[0\]`: `compression` must name .*did you mean 'onebit'",
    ),
    "no packets": (
        HEAD + f"choices: [{{{CHOICE}, compression: powersgd, topology: ps}}]\n",
        "must make packets",
    ),
    "endless seconds": (
        HEAD + "choices: []\npredicted_seconds: .inf\n",
        "`predicted_seconds` must be a number >= 0, or null. Received: inf",
    ),
    "no seconds": (HEAD + "choices: []\npredicted_seconds: .nan\n", "Received: nan"),
    "a fact without name": (HEAD + "choices: []\nfacts: {1: a}\n", "keys of `facts` must be text"),
    "a list of facts": (HEAD + "choices: []\nfacts: [a]\n", "`facts` must be of type mapping"),
    "laughs": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{later}: &{later} [{', '.join(['*' + earlier] * 9)}]\n"
            for earlier, later in zip("abcdefgh", "bcdefghi", strict=True)
        )
        + HEAD
        + "choices: *i\n",
        "unknown key `a`",
    ),
    "a choice of laughs": (
        HEAD
        + "choices:\n- &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"- &{later} [{', '.join(['*' + earlier] * 9)}]\n"
            for earlier, later in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        r"a mapping at `choices\[0\]`\. Received: \['x', .*\.\.\.\]",
    ),
    "itself": (HEAD + "choices: &a [*a]\n", r"a mapping at `choices\[0\]`"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(case: str, tmp_path: Path) -> None:
    text, expected = WRONG[case]
    path = written(text, tmp_path)
    with pytest.raises(ConfigError, match=expected) as raised:
        Plan.read(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 1500


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be read: No such file"):
        Plan.read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Plan.read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be text in UTF-8"):
        Plan.read(tmp_path / "binary")


def test_a_plan_that_fits() -> None:
    PLAN.check([("x", 300), ("y", 2**24), ("z", 0)], 4)
    PLAN.check([("x", 300), ("y", 0), ("z", 2**20)], 4)  # a table, apart in one of them


@pytest.mark.parametrize(
    ("gradients", "num_ranks", "expected"),
    [
        ([("x", 300), ("y", 2**24), ("z", 0)], 3, "ranks of this job, 3. Received: a plan for 4"),
        (
            [("x", 300), ("y", 8), ("z", 1)],
            4,
            "gradient 1 of the model, y, has 8 elements, and the plan's, dense, 16777216",
        ),
        ([("x", 300)], 4, "1 gradients in the model and 3 in the plan; only the plan has gradient "
         "1, dense, with 16777216 elements"),
        (
            [("x", 300), ("y", 2**24), ("z", 0), ("more", 9)],
            4,
            "only the model has gradient 3, more, with 9 elements",
        ),
    ],
)  # fmt: skip
def test_the_first_mismatch_is_named(
    gradients: list[tuple[str, int]], num_ranks: int, expected: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        PLAN.check(gradients, num_ranks)
    assert expected in str(raised.value)


def test_the_columns_of_hipress(tmp_path: Path) -> None:
    text = PLAN.to_secopa()
    assert text == "conv, first: 1,300,n,1\ndense,16777216,y,16\nnothing,0,n,1\n"
    path = written(text, tmp_path)
    read = Plan.from_secopa(path, 4, ONEBIT, "ring")
    assert [dataclasses.replace(one, predicted_seconds=None) for one in PLAN.choices] == list(
        read.choices
    )
    assert read.num_ranks == 4


def test_three_columns_take_their_sizes_from_the_model(tmp_path: Path) -> None:
    path = written("a.b,y,16\n\nc,n,1\n", tmp_path)
    plan = Plan.from_secopa(path, 2, "onebit", gradients=[("x", 7), ("y", 9)])
    assert plan.choices == (Choice("a.b", 7, "onebit", "ps", 16), Choice("c", 9))
    with pytest.raises(ConfigError, match="three columns do not say how large"):
        Plan.from_secopa(path, 2, "onebit")
    with pytest.raises(ConfigError, match=r"a line for each of 1 gradients\. Received: 2"):
        Plan.from_secopa(path, 2, "onebit", gradients=[("x", 7)])


@pytest.mark.parametrize("line", ["a", "a,5,maybe,1", "a,5,y,0", "a,5,y,-1", "a,y", "a,5,y,\u00b2"])
def test_other_columns_are_refused(line: str, tmp_path: Path) -> None:
    path = written(f"b,5,n,1\n{line}\n", tmp_path)
    with pytest.raises(ConfigError, match=rf"{path}:2: expected `name,num_elements,y\|n,part"):
        Plan.from_secopa(path, 2, "onebit")


def test_sizes_that_contradict_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradient 0 of the model, x, has 7 elements"):
        Plan.from_secopa(written("a,5,n,1\n", tmp_path), 2, "onebit", gradients=[("x", 7)])


def test_gradients_of_hipress(tmp_path: Path) -> None:
    assert read_lines(written("a,b,5\n c ,0\n\n", tmp_path)) == [("a,b", 5), ("c", 0)]
    for text in ("a\n", "a,-1\n", "a,1e3\n", ",5\n", f"a,{2**49}\n", f"a,{'9' * 9000}\n", ""):
        with pytest.raises(ConfigError, match="expected `name,num_elements`"):
            read_lines(written(text, tmp_path))
