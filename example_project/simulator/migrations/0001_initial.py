from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='PlainCounter',
            fields=[
                ('run', models.CharField(max_length=40, primary_key=True, serialize=False)),
                ('value', models.IntegerField(default=0)),
            ],
            options={
                'abstract': False,
            },
        ),
        migrations.CreateModel(
            name='HighWaterCounter',
            fields=[
                ('run', models.CharField(max_length=40, primary_key=True, serialize=False)),
                ('value', models.IntegerField(default=0)),
                ('fence', models.BigIntegerField(db_default=0)),
            ],
            options={
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('fence__gte', 0)), name='simulator_highwatercounter_fence_rejected')],
            },
        ),
        migrations.CreateModel(
            name='SerialisedCounter',
            fields=[
                ('run', models.CharField(max_length=40, primary_key=True, serialize=False)),
                ('value', models.IntegerField(default=0)),
                ('fence', models.BigIntegerField(db_default=0)),
            ],
            options={
                'abstract': False,
                'constraints': [models.CheckConstraint(condition=models.Q(('fence__gte', 0)), name='simulator_serialisedcounter_fence_rejected')],
            },
        ),
    ]
