import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('accounts', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='Customer',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100)),
                ('email', models.EmailField(max_length=254)),
                ('version', models.BigIntegerField(db_default=0)),
            ],
            options={
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('version__gte', 0)), name='billing_customer_version_rejected')],
            },
        ),
        migrations.CreateModel(
            name='Invoice',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.CharField(max_length=20, unique=True)),
                ('amount', models.DecimalField(decimal_places=2, max_digits=12)),
                ('status', models.CharField(choices=[('open', 'open'), ('paid', 'paid')], default='open', editable=False, max_length=10)),
                ('receipt', models.CharField(blank=True, editable=False, max_length=40)),
                ('fence', models.BigIntegerField(db_default=0)),
                ('version', models.BigIntegerField(db_default=0)),
                ('account', models.ForeignKey(help_text='The account that gets the money.', on_delete=django.db.models.deletion.PROTECT, to='accounts.account')),
                ('customer', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='invoices', to='billing.customer')),
            ],
            options={
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('fence__gte', 0)), name='billing_invoice_fence_rejected'), models.CheckConstraint(condition=models.Q(('version__gte', 0)), name='billing_invoice_version_rejected')],
            },
        ),
    ]
