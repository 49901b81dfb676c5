/*
 * Leases on Redis whose grants the fence database records: backends/redis/scripts.py,
 * core/grants.py, and Ledger.record() in storage/.
 *
 * Each script and each statement is one step. Weak variants: DRAWN_BEFORE and DRAWN_AFTER, as
 * tutorials have it, with the token drawn before or after SET NX and checked by the row alone;
 * NOT_RECORDED, where the token is Redis's own; RECORDS_EQUAL, with <= for <; ANY_OWNER, with a bare
 * DEL and PEXPIRE; RECORDS_BLINDLY, where the next number is recorded over whatever the fence has by
 * then; VERIFIES_FIRST, where the fence is read after the service was asked; those of a forced
 * release, and COUNTER_AS_IT_WAS, where it frees the key and no more; and COUNTS_FENCED, where an
 * unfenced grant leaves the counter as it is.
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
#define HAS_LOCK(o) (key_owner == o && key_token == drawn_of[o])
/* The owner of a counter after a release, a suggestion, or an unfenced grant. */
#define NONE 9
/* No other owner came since o drew t, as far as Redis knows. */
#define NONE_CAME(o, t) ((seq == t && seq_owner == o) || (seq == 0 && seq_owner == 0))

#include "common.pml"

byte losses = LOSSES;
#ifdef UNFENCED
/* How many unfenced holders there may be yet. */
byte unfenced = UNFENCED;
#endif

/* The keys "lock" and "counter"; without a counter, both of its bytes are 0. */
byte key_owner, key_token, seq, seq_owner;
/* By owner: the token that Redis proposed, and the fence that was read before it was recorded. */
byte drawn_of[OWNERS + 1], read_token[OWNERS + 1], read_owner[OWNERS + 1];
/* By owner: which grant its recording was. */
byte recorded_as[OWNERS + 1];
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
    :: key_owner == 0 && NONE_CAME(o, t) ->
       seq = t; seq_owner = o; key_owner = o; key_token = t; running = o; kept = true
    :: key_owner == 0 && !NONE_CAME(o, t)
    fi;
    if
    :: kept -> renewed(o)
    :: else
    fi
}

/* RELEASE: frees the key if it is o's, and keeps o from renewing what has expired. */
inline free(o, above) {
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
       fi;
       leave_counter(o, above)
    :: key_owner == 0 -> leave_counter(o, above)
    :: else
    fi
}

inline leave_counter(o, above) {
#ifndef COUNTER_AS_IT_WAS
    if
    :: seq_owner == o || (seq == 0 && seq_owner == 0) || seq < above ->
       seq = (seq < above -> above : seq); seq_owner = NONE
    :: else
    fi;
#endif
    skip
}

/* Ledger.record(): ... token = new, owner = me WHERE token < new, or WHERE (token, owner) = read */
#define RECORDED 1
#define REFUSED 2
#define PINNED 3
#ifdef RECORDS_EQUAL
#define IS_NEWER(t) (fence_token <= t)
#else
#define IS_NEWER(t) (fence_token < t)
#endif
#ifdef RECORDS_BLINDLY
#define AS_READ(o) true
#else
#define AS_READ(o) (fence_token == read_token[o] && fence_owner == read_owner[o])
#endif
inline record(o, t, may) {
    if
    :: pins > 0 -> outcome = PINNED
    :: pins == 0 && may ->
       fence_token = t; fence_owner = o; row_of = o; recorded(o); mine = serial;
       recorded_as[o] = serial; outcome = RECORDED
    :: else -> outcome = REFUSED
    fi
}

inline verify(o) {
    atomic {
        kept = (key_owner == o && key_token == drawn) || (key_owner == 0 && NONE_CAME(o, drawn));
        printf("owner %d verifies its lock: %d\n", o, kept)
    }
}

proctype Client() {
    byte me, got, turn, mine, floor, other, seen, loaded, drawn, outcome, tries;
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
       drawn = got;
#ifndef UNRECORDED
       /* Grants._record() */
       tries = 0;
       do
       :: tries < 3 ->
          tries++;
          atomic {
              if
              :: tries == 1 -> record(me, got, IS_NEWER(got))
              :: else -> record(me, got, AS_READ(me))
              fi;
              printf("owner %d records %d: %d\n", me, got, outcome)
          };
          if
          :: outcome == RECORDED -> break
          :: outcome == PINNED -> got = 0; break
          :: outcome == REFUSED ->
#ifdef VERIFIES_FIRST
             verify(me);
#endif
             d_step { read_token[me] = fence_token; read_owner[me] = fence_owner };
             if
             :: read_owner[me] == me && read_token[me] == got -> mine = recorded_as[me]; break
             :: else
             fi;
#ifndef VERIFIES_FIRST
             verify(me);
#endif
             if
             :: kept -> kept = false; got = read_token[me] + 1
             :: else -> got = 0; break
             fi
          fi
       :: else -> got = 0; break
       od;
       if
       :: got == 0 -> atomic { free(me, drawn) }; goto next
       :: got > drawn ->
          /* SUGGEST */
          atomic {
              if
              :: seq < got -> seq = got; seq_owner = NONE
              :: else
              fi
          }
       :: else
       fi;
       /* Keeper.tick() and compare(). Grants._recorded() releases a grant that is late. */
       if
       :: true
       :: true ->
          atomic { renew(me, drawn); printf("owner %d was late, and renews: %d\n", me, kept) };
          if
          :: !kept || fence_token != got || fence_owner != me ->
             atomic { free(me, got) }; goto next
          :: else
          fi
       fi;
#endif
       d_step { drawn_of[me] = drawn; hand_out(me, got) };
       write(me);
       /* Service._finish() */
       if
       :: true -> atomic { given_back[me] = true; free(me, got); printf("owner %d releases\n", me) }
       :: late > 0 -> given_back[me] = true; printf("owner %d releases, unheard\n", me)
       :: crashes > 0 ->
          atomic { crashes--; gone[me] = true; printf("owner %d dies\n", me) };
          break
       fi;
next:
       got = 0; turn = 0; mine = 0; seen = 0; loaded = 0; kept = 0; floor = 0; me = 0;
       drawn = 0; outcome = 0; tries = 0
    :: begun == OWNERS -> break
    od
}

/* RELEASE by the owner's id, of a lock that another holder may have by now. */
inline take_away(o) {
    atomic {
        if
        :: key_owner != 0 && key_owner != o -> printf("the key isn't owner %d's any more\n", o)
        :: else ->
#ifndef NOT_FREED
           free(o, 0);
#endif
           take(o)
        fi
    }
}

/* Revoking.revoke(): raises the fence if it is o's, or still as it was read or raised last. */
inline raise(o) {
    atomic {
        pins == 0;
        if
        :: fence_owner == o || fence_token < told ||
           (fence_token == read_token[0] && fence_owner == read_owner[0]) ->
           if
           :: fence_owner == o -> forced_out = serial
           :: else
           fi;
           fence_token = (fence_token < told -> told : fence_token) + 1;
           fence_owner = 0; at_lift = serial; lifted = fence_token;
           read_token[0] = fence_token; read_owner[0] = 0;
           printf("the fence is raised to %d, above owner %d\n", lifted, o)
        :: else -> lifted = fence_token; at_lift = serial
        fi
    }
}

/* ops/force_release.py: raise, release, raise again. */
inline force() {
#ifdef FREE_BEFORE
    take_away(victim);
#endif
#ifdef FREE_WITHOUT_LIFT
    lifted = told; at_lift = serial;
#else
    raise(victim);
#endif
#ifndef FREE_BEFORE
    take_away(victim);
#endif
#ifndef FREE_WITHOUT_LIFT
    raise(victim);
#endif
    victim = 0; told = 0; lifted = 0; read_token[0] = 0; read_owner[0] = 0
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
           :: key_owner == who -> late--; record(who, key_token, IS_NEWER(key_token));
              printf("late: owner %d records: %d\n", who, outcome)
           :: read_token[who] != 0 -> late--; record(who, read_token[who] + 1, AS_READ(who));
              printf("late: owner %d records the next number: %d\n", who, outcome)
#endif
           :: token_of[who] != 0 -> late--; renew(who, drawn_of[who]);
              printf("late: owner %d renews: %d\n", who, kept)
           :: given_back[who] -> late--; free(who, token_of[who]); printf("late: owner %d releases\n", who)
           :: else
           fi;
           who = 0; got = 0; turn = 0; mine = 0; outcome = 0; kept = 0
       }
    :: atomic {
           /* Keeper.compare(): an old owner that has its key back gives it up. */
           key_owner != 0 && token_of[key_owner] != 0 && row_of != key_owner &&
           fence_owner != key_owner -> printf("owner %d gives the key up\n", key_owner);
           key_owner = 0; key_token = 0; running = 0
       }
    :: atomic {
           key_owner != 0 && gone[key_owner] -> printf("evicts owner %d\n", key_owner);
           who = key_owner; free(who, 0); who = 0
       }
#ifdef UNFENCED
    :: atomic {
           /* ACQUIRE, without a token of its own; and RELEASE. */
           unfenced > 0 && key_owner == 0 -> unfenced--;
           printf("an unfenced holder comes and goes\n");
           if
#ifndef COUNTS_FENCED
           :: seq > 0 -> seq++; seq_owner = NONE
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
           forces > 0 -> forces--; read_token[0] = fence_token; read_owner[0] = fence_owner
       };
       /* The fence was read before the service is asked. */
       atomic {
           if
           :: key_owner != 0 -> victim = key_owner; told = key_token
           :: else
           fi
       };
       if
       :: victim != 0 -> force()
       :: else -> read_token[0] = 0; read_owner[0] = 0
       fi
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
