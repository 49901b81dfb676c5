import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='Sale',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('title', models.CharField(max_length=100)),
                ('left', models.PositiveIntegerField()),
                ('fence', models.BigIntegerField(db_default=0)),
            ],
            options={
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('fence__gte', 0)), name='shop_sale_fence_rejected')],
            },
        ),
        migrations.CreateModel(
            name='Stock',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('warehouse', models.SlugField(max_length=40)),
                ('article', models.CharField(max_length=40)),
                ('count', models.PositiveIntegerField()),
                ('fence', models.BigIntegerField(db_default=0)),
            ],
            options={
                'verbose_name_plural': 'stock',
                'constraints': [models.UniqueConstraint(fields=('warehouse', 'article'), name='counted_once'), models.CheckConstraint(condition=models.Q(('fence__gte', 0)), name='shop_stock_fence_rejected')],
            },
        ),
        migrations.CreateModel(
            name='Order',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('buyer', models.CharField(max_length=100)),
                ('fence', models.BigIntegerField(db_default=0)),
                ('sale', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='orders', to='shop.sale')),
            ],
            options={
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('fence__gte', 0)), name='shop_order_fence_rejected')],
            },
        ),
    ]
