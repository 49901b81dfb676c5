/*
 * Leases on Redis whose grants the fence database records: backends/redis.py, redis_recording.py,
 * redis_scripts.py, and RECORD in fences/postgresql.py.
 *
 * Each script is one step. Weak variants: DRAWN_BEFORE and DRAWN_AFTER, as tutorials have it, with
 * the token drawn before or after SET NX and checked by the row alone; NOT_RECORDED, where the
 * token is Redis's own; RECORDS_EQUAL, with <= for <; ANY_OWNER, with a bare DEL and PEXPIRE; those
 * of a forced release, and two where it frees the key and no more: COUNTER_AS_IT_WAS, and
 * BLIND_TO_COUNTER, which doesn't see that he whose key has run out drew a token above the fence;
 * and COUNTS_FENCED, where an unfenced grant leaves the counter as it is.
 */
#ifndef OWNERS
#define OWNERS 3
#endif
#ifndef CLIENTS
#define CLIENTS 2
#endif
#ifndef LATE
#define LATE 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef FORCES
#define FORCES 0
#endif
/* How often Redis may forget, or fail over to a replica that lacks the last writes. */
#ifndef LOSSES
#define LOSSES 1
#endif
#define WITH_ORDER

#if defined(DRAWN_BEFORE) || defined(DRAWN_AFTER) || defined(NOT_RECORDED)
#ifndef HIGH_WATER
#define HIGH_WATER
#endif
#define UNRECORDED
#endif

#define no_losses (losses == LOSSES)
#define HAS_LOCK(o) (key_owner == o && key_token == token_of[o])

#include "common.pml"

byte losses = LOSSES;
#ifdef UNFENCED
/* How many unfenced holders there may be yet. */
byte unfenced = UNFENCED;
#endif

/* KEYS[1], "owner:token:words", with a ttl; KEYS[2], "last token:owner who drew it". */
byte key_owner, key_token, seq, seq_owner;
/* What a replica has of them. */
byte old_owner, old_token, old_seq, old_seq_owner;
/* Whose row the registry has; a newer grant overwrites it. */
byte row_of;

/* draw(): a repeated request gets the same number. */
inline draw(o) {
    if
    :: seq_owner == o
    :: else -> seq++; seq_owner = o
    fi
}

/* ACQUIRE */
inline acquire(o) {
    got = 0;
    if
    :: key_owner == 0 ->
       give(o);
#ifndef DRAWN_AFTER
#ifndef DRAWN_BEFORE
       draw(o);
#endif
#endif
       key_owner = o; key_token = seq; got = seq
    :: key_owner == o -> got = key_token; turn = last_given
    :: else
    fi
}

/* RENEW: if somebody has it, who; if nobody has, whether somebody came since. */
inline renew(o, t) {
    kept = false;
    if
#ifdef ANY_OWNER
    :: key_owner != 0 -> kept = true
#else
    :: key_owner != 0 && key_owner == o && key_token == t -> kept = true
    :: key_owner != 0 && !(key_owner == o && key_token == t)
#endif
    :: key_owner == 0 && seq <= t ->
       seq = t; seq_owner = o; key_owner = o; key_token = t; running = o; kept = true
    :: key_owner == 0 && seq > t
    fi;
    if
    :: kept -> renewed(o)
    :: else
    fi
}

/* RELEASE, with or without a token */
inline free(o) {
    if
#ifdef ANY_OWNER
    :: key_owner != 0 ->
#else
    :: key_owner == o && key_owner != 0 ->
#endif
       key_owner = 0; key_token = 0;
       if
       :: running == o -> running = 0
       :: else
       fi
    :: else
    fi
}

/* RECORD: ... DO UPDATE SET token = new, owner = me WHERE f.token < EXCLUDED.token */
#define RECORDED 1
#define REFUSED 2
#define PINNED 3
#ifdef RECORDS_EQUAL
#define IS_NEWER(t) (fence_token <= t)
#else
#define IS_NEWER(t) (fence_token < t)
#endif
inline record(o, t) {
    if
    :: pins > 0 -> outcome = PINNED
    :: pins == 0 && IS_NEWER(t) ->
       fence_token = t; fence_owner = o; row_of = o; recorded(o); mine = serial;
       outcome = RECORDED
    :: else -> outcome = REFUSED
    fi
}

/* REPAIR, with what the database knew: it may know more by now. */
inline repair(o) {
    if
    :: key_owner != o -> got = 0
    :: else ->
       if
       :: seq > newest -> draw(o)
       :: else -> seq = newest + 1; seq_owner = o
       fi;
       got = seq; key_token = seq;
       given++; last_given = given; turn = given
    fi
}

proctype Client() {
    byte me, got, turn, mine, floor, other, seen, loaded, newest, outcome, tries;
    bool kept;

    do
    :: atomic {
           /* Service.acquire(): new_owner() */
           begun < OWNERS -> begun++; me = begun; floor = completed
       };
#ifdef DRAWN_BEFORE
       /* INCR, and then SET NX */
       atomic { seq++; got = seq; printf("owner %d draws %d\n", me, got) };
       atomic {
           if
           :: key_owner == 0 -> give(me); key_owner = me; key_token = got; recorded(me);
              mine = serial; printf("owner %d sets the key\n", me)
           :: else -> got = 0
           fi
       };
#else
       atomic {
           if
           :: acquire(me); printf("owner %d acquires: %d\n", me, got)
           :: late > 0 -> printf("owner %d gets no answer\n", me)
           fi;
#ifdef UNRECORDED
           recorded(me); mine = serial
#endif
       };
#endif
       if
#ifdef DRAWN_AFTER
       :: key_owner != me -> goto next
       :: key_owner == me;
          atomic { seq++; got = seq; printf("owner %d draws %d\n", me, got) }
#else
       :: got == 0 -> goto next
       :: got != 0
#endif
       fi;
#ifndef UNRECORDED
       /* RedisBackend._granted(): at most REPAIRS times */
       tries = 0;
       do
       :: tries < 2 ->
          tries++;
          atomic { record(me, got); printf("owner %d records %d: %d\n", me, got, outcome) };
          if
          :: outcome == RECORDED -> break
          :: outcome == PINNED -> got = 0; break
          :: outcome == REFUSED ->
             newest = fence_token;
             atomic { repair(me); printf("owner %d repairs: %d\n", me, got) };
             if
             :: got == 0 -> break
             :: else
             fi
          fi
       :: else -> got = 0; break
       od;
       if
       :: got == 0 -> atomic { free(me) }; goto next
       :: else
       fi;
       /* Service._ask_for_lease(): once more before the caller's code runs. */
       if
       :: true
       :: true ->
          atomic { renew(me, got); printf("owner %d was late, and renews: %d\n", me, kept) };
          if
          :: !kept || row_of != me -> atomic { free(me) }; goto next
          :: else
          fi
       fi;
#endif
       d_step { hand_out(me, got) };
       write(me);
       /* Service._finish() */
       if
       :: true -> atomic { given_back[me] = true; free(me); printf("owner %d releases\n", me) }
       :: late > 0 -> given_back[me] = true; printf("owner %d releases, unheard\n", me)
       :: crashes > 0 ->
          atomic { crashes--; gone[me] = true; printf("owner %d dies\n", me) };
          break
       fi;
next:
       got = 0; turn = 0; mine = 0; seen = 0; loaded = 0; kept = 0; floor = 0; me = 0;
       newest = 0; outcome = 0; tries = 0
    :: begun == OWNERS -> break
    od
}

/* TAKE_AWAY: the counter goes above what he could renew, and the key is freed. */
inline take_away(o, t) {
    atomic {
        if
#ifdef BLIND_TO_COUNTER
        :: key_owner != 0 && (key_owner != o || key_token > t) ->
#else
        :: (key_owner != 0 && (key_owner != o || key_token > t)) ||
           (seq_owner == o && seq > t) ->
#endif
           printf("the key isn't owner %d's any more\n", o)
        :: else ->
#ifndef COUNTER_AS_IT_WAS
           if
           :: seq < t -> seq = t; seq_owner = 0
           :: else
           fi;
#endif
#ifndef NOT_FREED
           free(o);
#endif
           take(o)
        fi
    }
}

inline force() {
#ifdef FREE_BEFORE
    take_away(victim, told + 1);
#endif
#ifdef FREE_WITHOUT_LIFT
    lifted = told; at_lift = serial;
#else
    lift(victim, told);
#endif
#ifndef FREE_BEFORE
    take_away(victim, lifted);
#endif
    /* He may have been recording his grant meanwhile: once more. */
    if
    :: !is_out[victim] && (key_owner == victim || (key_owner == 0 && row_of == victim)) ->
       told = key_token;
       lift(victim, told);
       take_away(victim, lifted)
    :: else
    fi;
    victim = 0; told = 0; lifted = 0
}

proctype World() {
    byte who, got, turn, mine, victim, told, lifted, outcome;
    bool kept;

end:
    do
    :: atomic {
           key_owner != 0 -> key_owner = 0; key_token = 0; running = 0;
           printf("the key expires\n")
       }
    :: atomic {
           late > 0 && begun > 0 -> any_owner();
           if
#ifndef UNRECORDED
           :: true -> late--; acquire(who); printf("late: owner %d acquires: %d\n", who, got)
           /* The statement waited in the server, and its client has gone. */
           :: key_owner == who -> late--; record(who, key_token);
              printf("late: owner %d records: %d\n", who, outcome)
#endif
           :: token_of[who] != 0 -> late--; renew(who, token_of[who]);
              printf("late: owner %d renews: %d\n", who, kept)
           :: given_back[who] -> late--; free(who); printf("late: owner %d releases\n", who)
           :: else
           fi;
           who = 0; got = 0; turn = 0; mine = 0; outcome = 0; kept = 0
       }
    :: atomic {
           /* RedisBackend.renew_rows(): an old owner who has his key back gives it up. */
           key_owner != 0 && token_of[key_owner] != 0 && row_of != key_owner &&
           fence_owner != key_owner -> printf("owner %d gives the key up\n", key_owner);
           key_owner = 0; key_token = 0; running = 0
       }
    :: atomic {
           key_owner != 0 && gone[key_owner] -> printf("evicts owner %d\n", key_owner);
           who = key_owner; free(who); who = 0
       }
#ifdef UNFENCED
    :: atomic {
           /* ACQUIRE, without a token of its own; and RELEASE. */
           unfenced > 0 && key_owner == 0 -> unfenced--;
           printf("an unfenced holder comes and goes\n");
           if
#ifndef COUNTS_FENCED
           :: seq > 0 -> seq++; seq_owner = 0
#endif
           :: else
           fi;
           who = 1;
           do
           :: who <= OWNERS -> overtaken[who] = true; who++
           :: else -> break
           od;
           who = 0
       }
#endif
    :: d_step {
           losses > 0 ->
           old_owner = key_owner; old_token = key_token; old_seq = seq; old_seq_owner = seq_owner
       };
       atomic {
           losses--; running = 0;
           printf("Redis fails over: the key is owner %d's, the counter %d\n", old_owner, old_seq);
           key_owner = old_owner; key_token = old_token; seq = old_seq; seq_owner = old_seq_owner;
           running = old_owner;
           old_owner = 0; old_token = 0; old_seq = 0; old_seq_owner = 0
       }
    :: atomic {
           losses > 0 -> losses--; printf("Redis is empty\n");
           key_owner = 0; key_token = 0; seq = 0; seq_owner = 0; running = 0
       }
    :: atomic {
           forces > 0 && key_owner != 0 -> forces--; victim = key_owner; told = key_token
       };
       force()
    od
}

init {
    atomic {
        byte n = 0;
        do
        :: n < CLIENTS -> run Client(); n++
        :: else -> break
        od;
        n = 0;
        run World()
    }
}
