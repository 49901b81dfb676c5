/*
 * Row leases: backends/database.py, with storage/postgresql.py and storage/dialect.py.
 *
 * The row of `HeldLock` is the lease, judged by the server's clock, and one statement (on SQLite
 * and MariaDB: one transaction) takes it and draws the token.
 *
 * Weak variants: DRAWS_TWICE, where a claim that comes twice draws two tokens; ANY_OWNER, with no
 * owner in the DELETE; and those of a forced release.
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
#define FORCES 1
#endif

#define no_losses true
#define HAS_LOCK(o) (held_by == o && live)
#include "common.pml"

/* The row of `HeldLock`: its owner (0: there is none), and whether expires_at > now. */
byte held_by;
bool live;

/* CLAIM: RETURNING f.token, or no row. */
inline claim(o) {
    got = 0;
    if
    :: pins > 0 ->
       /* lock_timeout (LOCK_WAIT): the statement is undone as a whole. */
       printf("owner %d waits for the fence in vain\n", o)
    :: pins == 0 && (held_by == 0 || !live || held_by == o) ->
       /* With the row locked: WHERE h.expires_at <= clock_timestamp() OR h.owner = EXCLUDED.owner */
       give(o);
       held_by = o; live = true;
       /* DRAW: token + 1, unless this owner's claim came before */
       if
       :: fence_owner == o -> skip
#ifdef DRAWS_TWICE
          ; fence_token++
#endif
       :: else -> fence_token++; fence_owner = o; recorded(o)
       fi;
       got = fence_token; mine = serial
    :: pins == 0 ->
       /* WHERE NOT EXISTS (...): it saw a live row, which may have gone meanwhile. */
       printf("owner %d is refused\n", o)
    fi
}

/* RENEW: JOIN w ON h.name = w.name AND h.owner = w.owner. */
inline renew(o) {
    kept = (held_by == o);
    if
    :: kept -> live = true; running = o; renewed(o)
    :: else
    fi
}

/* Ledger.clear(): DELETE ... WHERE name IN (...) AND owner IN (...); releases and evictions. */
inline clear(o) {
    if
#ifdef ANY_OWNER
    :: held_by != 0 ->
#else
    :: held_by == o ->
#endif
       held_by = 0;
       if
       :: running == o -> running = 0
       :: else
       fi
    :: else
    fi
}

proctype Client() {
    byte me, got, turn, mine, floor, other, seen, loaded;
    bool kept;

    do
    :: atomic {
           /* Service.acquire(): new_owner() */
           begun < OWNERS -> begun++; me = begun; floor = completed
       };
       atomic {
           if
           :: claim(me); printf("owner %d claims: %d\n", me, got)
           :: late > 0 ->
              /* No answer came; the request is under way, or took effect. */
              printf("owner %d gets no answer\n", me); got = 0
           fi
       };
       if
       :: got == 0 -> goto next
       :: else
       fi;
       /* Service._ask_for_lease(): once more before the caller's code runs. */
       if
       :: true
       :: true ->
          atomic { renew(me); printf("owner %d was late, and renews: %d\n", me, kept) };
          if
          :: !kept -> atomic { clear(me) }; goto next
          :: else
          fi
       fi;
       d_step { hand_out(me, got) };
       write(me);
       /* Service._finish() */
       if
       :: true -> atomic { given_back[me] = true; clear(me); printf("owner %d releases\n", me) }
       :: late > 0 -> given_back[me] = true; printf("owner %d releases, unheard\n", me)
       :: crashes > 0 ->
          atomic { crashes--; gone[me] = true; printf("owner %d dies\n", me) };
          break
       fi;
next:
       got = 0; turn = 0; mine = 0; seen = 0; loaded = 0; kept = 0; floor = 0; me = 0
    :: begun == OWNERS -> break
    od
}

/* DatabaseBackend.take_away() */
inline take_away(o) {
    atomic {
        if
        :: held_by == o ->
#ifndef NOT_FREED
           clear(o);
#endif
           take(o)
        :: else -> printf("the lock isn't owner %d's any more\n", o)
        fi
    }
}

inline force() {
#ifdef FREE_BEFORE
    take_away(victim);
#endif
#ifndef FREE_WITHOUT_LIFT
    /* What the service tells is the recorded token. */
    lift(victim, 0);
#endif
#ifndef FREE_BEFORE
    take_away(victim);
#endif
    victim = 0; lifted = 0
}

proctype World() {
    byte who, got, turn, mine, victim, lifted;
    bool kept;

end:
    do
    :: atomic { live -> live = false; running = 0; printf("the lease runs out\n") }
    :: atomic {
           late > 0 && begun > 0 -> any_owner();
           if
           :: true -> late--; claim(who); printf("late: owner %d claims: %d\n", who, got)
           :: token_of[who] != 0 -> late--; renew(who); printf("late: owner %d renews\n", who)
           :: given_back[who] -> late--; clear(who); printf("late: owner %d releases\n", who)
           fi;
           who = 0; got = 0; turn = 0; mine = 0; kept = 0
       }
    :: atomic {
           /* Backend.evict_if_gone(), celery/burials.py: once the process is gone. */
           held_by != 0 && gone[held_by] -> printf("evicts owner %d\n", held_by);
           who = held_by; clear(who); who = 0
       }
    :: atomic { forces > 0 && held_by != 0 -> forces--; victim = held_by };
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
