import json

from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_http_methods

from django_fencedlock import VersionConflict

from .models import Customer


@require_http_methods(["GET", "PUT"])
def customer(request: HttpRequest, pk: int) -> HttpResponse:
    """
    Show a customer, or save a change.

    A PUT sends the version that it is based on in If-Match; GET returns it as ETag.
    """
    if request.method == "GET":
        return _shown(get_object_or_404(Customer, pk=pk))
    version = request.headers.get("If-Match", "").strip('"')
    if not version.isdigit():
        return JsonResponse({"error": "Send the version that you changed in If-Match."}, status=428)
    try:
        sent = json.loads(request.body)
        changed = Customer(pk=pk, version=int(version), name=sent["name"], email=sent["email"])
        changed.clean_fields()
        # A conflict rolls back the enclosing transaction: here, only this one.
        with transaction.atomic():
            changed.save(force_update=True)
    except (ValueError, KeyError, TypeError, ValidationError) as exc:
        return JsonResponse({"error": f"Invalid customer: {exc}"}, status=400)
    except VersionConflict as exc:
        return JsonResponse({"error": str(exc)}, status=412)
    return _shown(changed)


def _shown(found: Customer) -> JsonResponse:
    shown = {"name": found.name, "email": found.email}
    return JsonResponse(shown, headers={"ETag": f'"{found.version}"'})
