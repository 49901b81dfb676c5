from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST, require_safe

from django_fencedlock import LockNotAcquired

from .bestsellers import bestsellers
from .models import Sale
from .sales import SoldOut, sell


@require_POST
def buy(request: HttpRequest, pk: int) -> JsonResponse:
    """Sell one item to the buyer."""
    try:
        order = sell(pk, request.POST.get("buyer", "guest"))
    except Sale.DoesNotExist:
        return JsonResponse({"error": f"There is no sale {pk}."}, status=404)
    except SoldOut as exc:
        return JsonResponse({"error": str(exc)}, status=409)
    except LockNotAcquired:
        busy = {"error": "Too many buyers at once. Try again."}
        return JsonResponse(busy, status=503, headers={"Retry-After": "1"})
    return JsonResponse({"order": order.pk}, status=201)


@require_safe
def best(request: HttpRequest) -> JsonResponse:
    """Return the bestsellers."""
    return JsonResponse({"bestsellers": bestsellers()})
