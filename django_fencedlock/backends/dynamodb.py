"""The DynamoDB backend: a lock is an item, which conditional writes take and release."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..conf import DEFAULT_ALIAS, AliasConfig, Problem, shown
from ..conf import config as read_settings
from ..core.runtime import PerHub, clock
from ..exceptions import BackendUnavailable
from ..problems import clock_problem, ok
from .cell import CellBackend
from .dynamodb_clock import ServiceClock
from .interface import Claim, Grant, Granted, Held, Renewal

try:
    from boto3.session import Session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
except ImportError as exc:
    raise ImproperlyConfigured(
        "The dynamodb backend needs boto3. Run: pip install 'django-fencedlock[dynamodb]'"
    ) from exc

#: Seconds that an expired lock stays taken: a `Date` may be a second old, and clocks differ.
MARGIN = 1.0
#: Seconds from a release until the table's TTL may delete the item.
KEPT = 30 * 86400
#: The most that one request may renew, and look up.
RENEWED, LOOKED_UP = 25, 100

NAMES = re.compile(r"#\w+")
IS_FREE = "attribute_not_exists(#owner) OR (#owner <> :owner AND #lease.#expires < :past)"
TAKE = "REMOVE #delete_at SET #owner = :owner, #identity = :who, #lease = :lease ADD #fence :one"
RELEASE = "REMOVE #owner, #identity, #lease SET #delete_at = :later"
# An expired lock that no other owner took is still its owner's.
RENEW = 'UPDATE "{}" SET "lease" = ? WHERE "name" = ? AND "owner" = ?'
KEY = [{"AttributeName": "name", "KeyType": "HASH"}]
TYPES = [{"AttributeName": "name", "AttributeType": "S"}]
RENEWALS = {"": Renewal.KEPT, "ConditionalCheckFailed": Renewal.LOST}
#: What to do about an error, by a part of its name.
REMEDIES = {
    "ResourceNotFound": f"""Create table {{!r}}: manage.py shell -c "from {__name__} import """
    """create_table; create_table({!r})\"""",
    "AccessDenied": "Allow dynamodb:UpdateItem, BatchGetItem, PartiQLUpdate and DescribeTable.",
    "Credentials": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use an IAM role.",
    "dClient|Signature|Token": "Correct the credentials that boto3 finds, or the system's clock.",
    "Endpoint|Connect|Timeout|SSL": "Look at OPTIONS['REGION'], OPTIONS['ENDPOINT'], the network.",
    "Thrott|Throughput|RequestLimit": "Use the on-demand mode, or raise the table's capacity.",
}


class RequestFailed(Exception):
    """DynamoDB refused a request, or didn't answer it in time."""


class DynamoDBBackend(CellBackend):
    """Locks in a table of DynamoDB. Each acquire, renewal and release is one write."""

    label = "dynamodb"
    errors = (RequestFailed,)
    option_names = frozenset({"TIMEOUT", "REGION", "ENDPOINT"})

    def __init__(self, config: AliasConfig) -> None:
        super().__init__(config)
        self._table, self._time = config.location, ServiceClock()
        self.after_fork()

    def after_fork(self) -> None:
        self._clients = PerHub(self._connect)

    def close(self) -> None:
        for client in self._clients.all():
            client.close()

    def take(self, claim: Claim) -> Granted | Held:
        since = clock()
        values = {
            ":owner": {"S": claim.owner},
            ":who": {"S": claim.identity},
            ":lease": self._lease(claim),
            ":past": _number(self._now()[0] - MARGIN),
            ":one": _number(1),
        }
        answer = self._update(claim.name, TAKE, IS_FREE, values)
        item = answer.get("Attributes") or answer.get("Item", {})
        if (held := self._held(item)).owner != claim.owner:
            return held
        # An earlier request may have taken it: the lease counts from that one.
        since = min(since, clock() + _expiry(item) - self._now()[1] - claim.ttl)
        return Granted(held.token, since, item["fence"]["N"])

    def release(self, grant: Grant) -> bool:
        with self._asking("release", grant.name):
            values = {":owner": {"S": grant.owner}, ":later": _number(int(self._now()[0]) + KEPT)}
            answer = self._update(grant.name, RELEASE, "#owner = :owner", values)
        if "Error" not in answer:
            return True
        # After a lost answer, the second request finds the lock released by the first.
        again, item = answer["ResponseMetadata"]["RetryAttempts"], answer.get("Item", {"owner": 0})
        return again > 0 and "owner" not in item and item["fence"]["N"] == grant.handle

    def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        # DynamoDB refuses a batch that has a name twice: the core repeats what isn't answered.
        unique, found = list({each.name: each for each in grants}.values()), dict[str, Renewal]()
        statement = RENEW.format(self._table)
        try:
            for start in range(0, len(unique), RENEWED):
                some = unique[start : start + RENEWED]
                values = [[self._lease(one), self._key(one.name), {"S": one.owner}] for one in some]
                sent = [{"Statement": statement, "Parameters": each} for each in values]
                answer = self._ask("batch_execute_statement", Statements=sent)
                for grant, each in zip(some, answer["Responses"], strict=True):
                    error = {"Code": "", **each.get("Error", {})}
                    if re.match("AccessDenied|ResourceNotFound|Validation", error["Code"]):
                        raise RequestFailed(self._explain(error))
                    found[grant.owner] = RENEWALS.get(error["Code"], Renewal.UNKNOWN)
        except RequestFailed as exc:
            if not found:
                raise self.unavailable("renew", exc) from exc
        return [found.get(grant.owner, Renewal.UNKNOWN) for grant in grants]

    def verify(self, grant: Grant) -> bool:
        with self._asking("verify", grant.name):
            item = self._items([grant.name]).get(grant.name, {})
        return bool(item.get("owner") == {"S": grant.owner})

    def holders(self, names: Sequence[str]) -> Mapping[str, Held]:
        with self._asking("look up locks"):
            items = self._items(names).items()
            past = self._now()[0] - MARGIN
        is_held = {name: "owner" in item and _expiry(item) >= past for name, item in items}
        return {name: self._held(item) for name, item in items if is_held[name]}

    def suggest(self, name: str, floor: int) -> None:
        is_behind = "attribute_not_exists(#fence) OR #fence < :floor"
        with self._asking("suggest a token for", name):
            self._update(name, "SET #fence = :floor", is_behind, {":floor": _number(floor)})

    def _key(self, name: str) -> dict[str, str]:
        return {"S": f"{self.config.key_prefix}{name}"}

    def _lease(self, of: Claim | Grant) -> dict[str, Any]:
        # One attribute: not every emulator's PartiQL can set two.
        lease = {"expires": _number(self._now()[1] + of.ttl), "ttl": _number(of.ttl)}
        return {"M": {**lease, "fenced": {"BOOL": of.fenced}}}

    def _held(self, item: Mapping[str, Any]) -> Held:
        if "owner" not in item:
            return Held()
        lease = item["lease"]["M"]
        left = min(float(lease["ttl"]["N"]), max(0.0, _expiry(item) - self._now()[1]))
        token = int(item["fence"]["N"]) if lease["fenced"]["BOOL"] else None
        return Held(item["owner"]["S"], item["identity"]["S"], token, left)

    def _items(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the items of names, as the newest write left them."""
        keys = {self._key(each)["S"]: each for each in names}
        left, found = [{"name": {"S": key}} for key in keys], dict[str, Any]()
        while left:
            some, left = left[:LOOKED_UP], left[LOOKED_UP:]
            asked = {self._table: {"Keys": some, "ConsistentRead": True}}
            answer = self._ask("batch_get_item", RequestItems=asked)
            items = answer["Responses"].get(self._table, [])
            found |= {keys[item["name"]["S"]]: item for item in items}
            # What a busy service left out is asked for again.
            left += answer.get("UnprocessedKeys", {}).get(self._table, {}).get("Keys", [])
        return found

    def _update(self, name: str, change: str, condition: str, values: Mapping[str, Any]) -> Any:
        """Change an item; the answer has "Error" and "Item" if the condition didn't hold."""
        return self._ask(
            "update_item",
            TableName=self._table,
            Key={"name": self._key(name)},
            UpdateExpression=change,
            ConditionExpression=condition,
            ExpressionAttributeNames={one: one[1:] for one in NAMES.findall(change + condition)},
            ExpressionAttributeValues=values,
            ReturnValues="ALL_NEW",
            ReturnValuesOnConditionCheckFailure="ALL_OLD",
        )

    def _connect(self) -> Any:
        # All tries end within the timeout, with the pause of up to a second that boto3 makes.
        timeout, tries = self.config.timeout, 1 if self.config.timeout < 2 else 2
        limit = (timeout + 1 - tries) / 2 / tries
        limits = {"connect_timeout": limit, "read_timeout": limit, "max_pool_connections": 50}
        retries = {"total_max_attempts": tries, "mode": "standard"}
        config = Config(**limits, retries=retries, parameter_validation=False)
        region, endpoint = map(self.config.options.get, ("REGION", "ENDPOINT"))
        return Session(region_name=region).client("dynamodb", endpoint_url=endpoint, config=config)

    def _now(self) -> tuple[float, float]:
        """Return the earliest and the latest time at the service. Any answer tells them."""
        if not self._time.is_known:
            self._items(["time"])
        if not self._time.is_known:
            raise RequestFailed("its answers have no Date header, by which locks expire.")
        return self._time.bounds(clock())

    def _ask(self, operation: str, **terms: Any) -> Any:
        """Send a request; boto3 may send it twice."""
        try:
            client, sent = self._clients.get(), clock()
            answer = getattr(client, operation)(**terms)
        except (BotoCoreError, ClientError) as exc:
            unknown = {"Error": {"Code": type(exc).__name__, "Message": exc}}
            answer = exc.response if isinstance(exc, ClientError) else unknown
            if answer["Error"]["Code"] != "ConditionalCheckFailedException":
                raise RequestFailed(self._explain(answer["Error"])) from exc
        facts = answer["ResponseMetadata"]
        if "RequestId" not in facts:
            raise RequestFailed("its answer isn't one of DynamoDB. Look at OPTIONS['ENDPOINT'].")
        self._time.hear(sent, clock(), facts["HTTPHeaders"].get("date"))
        return answer

    def _explain(self, error: Mapping[str, Any]) -> str:
        found = [remedy for part, remedy in REMEDIES.items() if re.search(part, error["Code"])]
        remedy = "".join(found).format(self._table, self.config.alias)
        return f"{error['Code']}: {str(error.get('Message', '')).rstrip('.')}. {remedy}".strip()

    @classmethod
    def problems(cls, config: AliasConfig) -> Iterator[Problem]:
        yield from super().problems(config)
        if not re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", config.location):
            what = f"{config.where('LOCATION')} is {shown(config.location)}, no name of a table."
            yield Problem("E007", what, "Use 3 to 255 of A-Z, a-z, 0-9, '_', '.' and '-'.")
        where, endpoint = config.where("OPTIONS"), config.options.get("ENDPOINT")
        if endpoint and not re.fullmatch(r"https?://[^/\s]+/?", str(endpoint)):
            what = f"{where}['ENDPOINT'] is {shown(endpoint)}."
            yield Problem("E008", what, "Write it as 'https://host', or 'http://127.0.0.1:8000'.")
        try:
            region = config.options.get("REGION") or Session().region_name
        except BotoCoreError as exc:
            yield Problem("E008", f"boto3 can't read its settings: {exc}", "Correct AWS_PROFILE.")
            return
        if not isinstance(region, str) or not re.fullmatch("[a-z0-9-]+", region):
            what = f"{where}['REGION'] is {shown(region)}."
            yield Problem("E008", what, "Set it, or AWS_DEFAULT_REGION, such as to 'eu-central-1'.")

    def check(self) -> Iterator[Problem]:
        try:
            with self._asking("answer"):
                yield from self._table_problems(f"Table {self._table!r} of {self.config.where()}")
        except BackendUnavailable as exc:
            what = str(exc)
            # An error would stop the migration that creates the table.
            yield Problem("W056", what) if "ResourceNotFound" in what else Problem("E013", what)

    def _table_problems(self, where: str) -> Iterator[Problem]:
        table = self._ask("describe_table", TableName=self._table)["Table"]
        mode = table.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
        yield ok(f"{where} is {table['TableStatus']}, billing mode {mode}.")
        if (table["KeySchema"], table["AttributeDefinitions"]) != (KEY, TYPES):
            what = f"{where} has another key than a partition key 'name' of type S."
            yield Problem("E056", what, "Name another table, and call create_table().")
            return
        if table.get("Replicas"):
            what = f"{where} is a global table: two regions can grant one lock at the same time."
            yield Problem("E056", what, "Use a table without replicas, for all processes.")
        # It renews nothing, but needs a permission that no other request needs.
        self.renew([Grant("check", "nobody", 1.0)])
        found = clock_problem(sum(self._now()) / 2 - time.time(), f"{where}: ")
        yield Problem("W005", found.message, found.hint) if found.id else found


def create_table(alias: str = DEFAULT_ALIAS) -> None:
    """Create the table of an alias, unless there is one, and wait until it can be used."""
    backend = DynamoDBBackend(read_settings(alias))
    client, name = backend._connect(), backend.config.location
    terms = {"TableName": name, "KeySchema": KEY, "AttributeDefinitions": TYPES}
    with contextlib.suppress(client.exceptions.ResourceInUseException):
        client.create_table(**terms, BillingMode="PAY_PER_REQUEST")
    client.get_waiter("table_exists").wait(TableName=name, WaiterConfig={"Delay": 2})


def _number(value: float) -> dict[str, str]:
    return {"N": str(round(value, 3))}


def _expiry(item: Mapping[str, Any]) -> float:
    return float(item["lease"]["M"]["expires"]["N"])
