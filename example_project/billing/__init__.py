"""Invoices, charged through a payment service that loses requests and answers."""
