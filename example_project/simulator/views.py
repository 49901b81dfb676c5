"""The page and its requests. It starts processes, so it is for local users only."""

from __future__ import annotations

import functools
import ipaddress
import secrets
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseForbidden, JsonResponse, QueryDict
from django.shortcuts import render
from django.urls import NoReverseMatch, reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_GET, require_POST

from . import telling
from .backends import BACKENDS
from .house import Room, house
from .mirror import NAMES
from .plans import FENCINGS, TTLS, Plan
from .scenarios import SCENARIOS
from .simulation import ACTIONS, LONGEST_PAUSE, Refused

COOKIE = "simulator"
#: Seconds for which a request waits for events.
PATIENCE = 8.0

View = Callable[..., HttpResponse]


def for_this_machine(view: View) -> View:
    """Reject requests from other machines, and without DEBUG all but staff users."""

    @functools.wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not _is_local(request):
            return HttpResponseForbidden(
                "The simulator starts processes, so it only answers on this machine's loopback "
                "address, and not through a proxy."
            )
        user = getattr(request, "user", None)
        if not settings.DEBUG and not (user is not None and user.is_active and user.is_staff):
            return HttpResponseForbidden(
                "The simulator starts processes, so without DEBUG it is for staff only. Log in "
                "to the admin first."
            )
        return view(request, *args, **kwargs)

    return guarded


@require_GET
@never_cache
@for_this_machine
@ensure_csrf_cookie
def page(request: HttpRequest) -> HttpResponse:
    try:
        plan, trouble = Plan.read(request.GET.dict()), ""
    except ValueError as exc:
        plan, trouble = Plan.read({}), f"Invalid address: {exc}"
    backends = [(each, each.missing()) for each in BACKENDS.values()]
    response = render(
        request,
        "simulator/page.html",
        {
            "plan": plan,
            "trouble": trouble,
            "scenarios": SCENARIOS,
            "backends": backends,
            "unavailable": [(each, missing) for each, missing in backends if missing],
            "fencings": FENCINGS,
            "ttls": TTLS,
            "names": NAMES,
            "admin_url": _admin_url(),
            "start": {
                "fencings": FENCINGS,
                "urls": {name: reverse(f"simulator:{name}") for name in _URLS},
                "defaults": {
                    key: {"backend": each.backend, "fencing": each.fencing, "about": each.about}
                    for key, each in SCENARIOS.items()
                },
            },
        },
    )
    if not _key(request):
        response.set_signed_cookie(
            COOKIE,
            secrets.token_hex(16),
            httponly=True,
            samesite="Lax",
            path=reverse("simulator:page"),
        )
    return response


@require_POST
@for_this_machine
def start(request: HttpRequest) -> HttpResponse:
    """Start a new run with the current options."""
    return _answer(request, lambda: _begin(request))


@require_POST
@for_this_machine
def script(request: HttpRequest) -> HttpResponse:
    """Play the scenario, do one step, or stop."""

    def do() -> Room:
        room = _room(request)
        if why := room.simulation.plan.obstacle():
            raise Refused(why)
        what = request.POST.get("do")
        if what not in ("play", "step", "stop"):
            raise Refused(f"do is {what!r}; choose from play, step, stop.")
        getattr(room.player, what)()
        return room

    return _answer(request, do)


@require_POST
@for_this_machine
def act(request: HttpRequest) -> HttpResponse:
    """Send a command to a client."""

    def do() -> Room:
        room = _room(request)
        name, action = request.POST.get("client", ""), request.POST.get("action", "")
        if name not in NAMES or action not in ACTIONS:
            raise Refused(f"Unknown command {action!r} or client {name!r}.")
        if missing := room.simulation.backend.missing():
            raise Refused(missing)
        facts = {"seconds": _seconds(request)} if action == "pause" else {}
        getattr(room.simulation, action)(name, **facts)
        return room

    return _answer(request, do)


@require_POST
@for_this_machine
def end(request: HttpRequest) -> HttpResponse:
    """End a run when the page is closed."""
    house.end(_key(request), _number(request.POST, "run"))
    return HttpResponse(status=204)


@require_GET
@never_cache
@for_this_machine
def events(request: HttpRequest) -> HttpResponse:
    """Return new events; wait for one if there is none."""
    room = house.room(_key(request))
    if room is None:
        return JsonResponse({"error": "The simulation has ended."}, status=410)
    if request.GET.get("run") == str(room.number):
        version, log = _number(request.GET, "version"), room.simulation.log
        log.wait_for(lambda: log.version > version or room.simulation.closed, PATIENCE)
        after = _number(request.GET, "after")
    else:
        after = 0
    return JsonResponse(telling.tell(room, after))


_URLS = ("start", "script", "act", "end", "events")


def _answer(request: HttpRequest, do: Callable[[], Room]) -> HttpResponse:
    try:
        room = do()
    except (Refused, ValueError) as exc:
        return JsonResponse({"error": str(exc)}, status=409)
    return JsonResponse({"run": room.number})


def _begin(request: HttpRequest) -> Room:
    key = _key(request)
    if not key:
        raise Refused("The page has lost its cookie. Reload it.")
    return house.begin(key, Plan.read(request.POST.dict()))


def _room(request: HttpRequest) -> Room:
    room = house.room(_key(request))
    if room is None:
        raise Refused("The simulation has ended. Restart it.")
    return room


def _key(request: HttpRequest) -> str:
    return request.get_signed_cookie(COOKIE, default="") or ""


def _seconds(request: HttpRequest) -> float | None:
    given = request.POST.get("seconds", "")
    if not given:
        return None
    if not given.isdigit() or not 0 < int(given) <= LONGEST_PAUSE:
        raise Refused(f"seconds is {given!r}; choose 1 to {LONGEST_PAUSE}.")
    return float(given)


def _number(facts: QueryDict, name: str) -> int:
    given = facts.get(name, "")
    return int(given) if given.isdigit() else 0


def _is_local(request: HttpRequest) -> bool:
    if request.headers.get("X-Forwarded-For") or request.headers.get("Forwarded"):
        return False
    try:
        return ipaddress.ip_address(request.META.get("REMOTE_ADDR", "")).is_loopback
    except ValueError:
        return False


def _admin_url() -> str:
    try:
        return reverse("admin:index")
    except NoReverseMatch:
        return ""
