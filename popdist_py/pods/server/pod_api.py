"""The calls of a pod's server, with the types of their arguments and results.

``json_values.py`` converts arguments and results into JSON and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from popdist_py.pods.model.json_values import read_fields
from popdist_py.pods.model.pod_parts import (
    Allocation,
    Attachment,
    Cluster,
    Holder,
    Partition,
    PartitionRequest,
    Pod,
)

Result = TypeVar("Result")

# The version of the calls. It is increased by a change that older clients or servers would
# misunderstand.
API: Final = 1
VERSION_PATH: Final = f"/v{API}/version"
USER_HEADER: Final = "X-Poprun-User"
REQUEST_HEADER: Final = "X-Poprun-Request"

# The size limit of a request is ten times the largest expected request, which makes a cluster of
# about a thousand agents.
MOST_REQUEST_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """An attachment that ends unless the holder renews it within ``seconds``."""

    attachment: Attachment
    seconds: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's answer that reports an error.

    ``error`` is the code of an error class in ``pod_errors.py``. ``message`` is the error message.
    """

    error: str
    message: str


@dataclass(frozen=True)
class Call(Generic[Result]):
    """A call that a pod's server answers, with the types of its arguments and its result.

    ``changes`` tells whether the call changes the pod. A call that changes the pod uses POST, and
    the request body contains the arguments. A call that only reads uses GET, and the query of the
    URL contains the arguments as text.
    """

    name: str
    arguments: Mapping[str, Any]
    result: Any
    changes: bool = True

    @property
    def path(self) -> str:
        """The path of the call on the server."""
        return f"/v{API}/{self.name}"

    def read_arguments(self, value: object) -> dict[str, Any]:
        """Check and return the arguments that a request has in its decoded body or query.

        Raises:
            InvalidRequestError: A field is unknown, missing or wrong; the message names the field.
        """
        return read_fields(self.arguments, {}, value, self.name)


POD: Final = Call[Pod]("pod", {}, Pod, changes=False)
PARTITIONS: Final = Call[tuple[Partition, ...]](
    "partitions", {}, tuple[Partition, ...], changes=False
)
PARTITION: Final = Call[Partition]("partition", {"name": str}, Partition, changes=False)
ATTACHMENTS: Final = Call[tuple[Attachment, ...]](
    "attachments", {}, tuple[Attachment, ...], changes=False
)
CREATE_PARTITION: Final = Call[Partition](
    "create-partition", {"request": PartitionRequest}, Partition
)
RESET_PARTITION: Final = Call[Partition]("reset-partition", {"name": str}, Partition)
FAIL_PARTITION: Final = Call[Partition]("fail-partition", {"name": str, "reason": str}, Partition)
REMOVE_PARTITION: Final = Call[None]("remove-partition", {"name": str, "force": bool}, None)
CREATE_CLUSTER: Final = Call[None]("create-cluster", {"cluster": Cluster}, None)
REMOVE_CLUSTER: Final = Call[None]("remove-cluster", {"name": str}, None)
CREATE_ALLOCATION: Final = Call[None]("create-allocation", {"allocation": Allocation}, None)
REMOVE_ALLOCATION: Final = Call[None]("remove-allocation", {"name": str}, None)
ATTACH: Final = Call[Lease](
    "attach",
    {"partition": str, "num_ipus": int, "holder": Holder, "ipus": tuple[int, ...] | None},
    Lease,
)
# The id of an attachment is secret. It is sent only in a request body, because servers log the
# paths of requests.
DETACH: Final = Call[None]("detach", {"attachment": Attachment}, None)
# The result of RENEW contains the ids of the leases that have ended.
RENEW: Final = Call[tuple[str, ...]]("renew", {"ids": tuple[str, ...]}, tuple[str, ...])

CALLS: Final[tuple[Call[Any], ...]] = (
    *(POD, PARTITIONS, PARTITION, ATTACHMENTS),
    *(CREATE_PARTITION, RESET_PARTITION, FAIL_PARTITION, REMOVE_PARTITION),
    *(CREATE_CLUSTER, REMOVE_CLUSTER, CREATE_ALLOCATION, REMOVE_ALLOCATION),
    *(ATTACH, DETACH, RENEW),
)
