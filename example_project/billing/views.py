import json

from django.core.exceptions import NON_FIELD_ERRORS
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_http_methods

from django_fencedlock import VersionConflict
from django_fencedlock.forms import VersionedModelForm

from .models import Customer


class CustomerForm(VersionedModelForm):
    class Meta:
        model = Customer
        fields = ["name", "email"]


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
        sent = {**json.loads(request.body), "seen_version": version}
    except (ValueError, TypeError) as exc:
        return JsonResponse({"error": f"Invalid JSON: {exc}"}, status=400)
    form = CustomerForm(sent, instance=get_object_or_404(Customer, pk=pk))
    try:
        if form.is_valid():
            return _shown(form.save())
    except VersionConflict:
        pass  # Another change came after is_valid(). The form has the error.
    is_stale = form.has_error(NON_FIELD_ERRORS, "version_conflict")
    return JsonResponse({"errors": form.errors}, status=412 if is_stale else 400)


def _shown(found: Customer) -> JsonResponse:
    shown = {"name": found.name, "email": found.email}
    return JsonResponse(shown, headers={"ETag": f'"{found.version}"'})
