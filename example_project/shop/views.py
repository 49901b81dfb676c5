from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST, require_safe

from django_fencedlock import LockNotAcquired

from .bestsellers import bestsellers
from .models import Sale
from .sales import SoldOut, sell


@require_POST
def buy(request: HttpRequest, pk: int) -> JsonResponse:
    """Sell one to whoever asks."""
    try:
        order = sell(pk, request.POST.get("buyer", "somebody"))
    except Sale.DoesNotExist:
        return JsonResponse({"error": f"There is no sale {pk}."}, status=404)
    except SoldOut as exc:
        return JsonResponse({"error": str(exc)}, status=409)
    except LockNotAcquired:
        busy = {"error": "There is a crowd. Try again."}
        return JsonResponse(busy, status=503, headers={"Retry-After": "1"})
    return JsonResponse({"order": order.pk}, status=201)


@require_safe
def best(request: HttpRequest) -> JsonResponse:
    """Show what sells best."""
    return JsonResponse({"bestsellers": bestsellers()})
