/*
 * Session locks of PostgreSQL: backends/postgres/.
 *
 * A process has one session for its locks, and a lock lives as long as the session. The threads of
 * a process share the session, and the server grants a session its own lock again: NO_TABLE shows
 * the result if the process doesn't look at its own table of holds first.
 */
#ifndef OWNERS
#define OWNERS 3
#endif
/* Two threads share each process; three are a process of two, and one of its own. */
#ifndef CLIENTS
#define CLIENTS 3
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
/* How often a session ends: a restart, an administrator, the server's idle limit. */
#ifndef LOSSES
#define LOSSES 1
#endif
#define PROCESSES 2

#define no_losses (losses == LOSSES)
#define HAS_LOCK(o) (key_count > 0 && row_of == o)

#include "common.pml"

byte losses = LOSSES;

/* pg_locks: which process's session has the key (1, 2), and how often it took it. */
byte key_of, key_count;
/* The registry's row. */
byte row_of;
/* SessionLocks.by_key: by process, the owner that holds the lock as far as the process knows. */
byte hold[PROCESSES + 1];
/* The owner that has to release its lock, since the lock was released by force. */
byte noted;
/* The process notices the end of its session at the next renewal or request. */
bool ended[PROCESSES + 1];

/* TRY: pg_try_advisory_lock(), and the record of the grant in the same statement. */
inline try(p, o) {
    got = 0;
    if
    :: key_count == 0 || key_of == p ->
       if
       :: pins > 0 ->
          /* The row has a lock_timeout. An error undoes the records, but not the lock: _send()
             unlocks it. If the process dies before, the session ends, and the lock with it. */
          printf("owner %d finds the fence pinned\n", o)
       :: pins == 0 ->
          give(o);
          key_of = p; key_count++; row_of = o;
          fence_token++; fence_owner = o; got = fence_token; recorded(o); mine = serial
       fi
    :: else
    fi
}

/* RELEASE: the row by its owner, the key by this session. */
inline unlock(p, o) {
    if
    :: row_of == o -> row_of = 0
    :: else
    fi;
    if
    :: key_of == p && key_count > 0 ->
       key_count--;
       if
       :: key_count == 0 -> key_of = 0; running = 0
       :: else
       fi
    :: else
    fi
}

inline end_session(p) {
    if
    :: key_of == p -> key_of = 0; key_count = 0; running = 0
    :: else
    fi;
    ended[p] = true
}

proctype Client(byte process) {
    byte me, got, turn, mine, floor, other, seen, loaded;
    bool held;

    do
    :: atomic {
           begun < OWNERS -> begun++; me = begun; floor = completed
       };
       /* PostgresBackend._try_on_session(), by the one thread, after _drop_closed(). */
       atomic {
           if
           :: ended[process] -> ended[process] = false; hold[process] = 0
           :: else
           fi;
           if
#ifdef NO_TABLE
           :: true ->
#else
           :: hold[process] != 0 -> printf("owner %d finds it held in its process\n", me)
           :: hold[process] == 0 ->
#endif
              try(process, me);
              printf("owner %d of process %d tries: %d\n", me, process, got);
              if
              :: got != 0 -> hold[process] = me
              :: else
              fi
           fi
       };
       if
       :: got == 0 -> goto next
       :: got != 0
       :: got != 0 && late > 0 ->
          /* SessionLocks.ask() wasn't answered in time: the thread undoes the job later. */
          printf("owner %d gets no answer\n", me);
          atomic {
              late--;
              if
              :: hold[process] == me && !ended[process] -> hold[process] = 0; unlock(process, me)
              :: else
              fi
          };
          goto next
       fi;
       d_step { hand_out(me, got) };
       write(me);
       if
       :: atomic {
              /* PostgresBackend._release(): only a lock that is still held. */
              if
#ifdef NO_TABLE
              :: true -> unlock(process, me)
#else
              :: hold[process] == me && !ended[process] -> hold[process] = 0; unlock(process, me)
              :: else
#endif
              fi;
              printf("owner %d releases\n", me)
          }
       :: crashes > 0 ->
          atomic {
              /* The process, with all its threads, without a message: its session ends. */
              crashes--; printf("process %d dies\n", process); end_session(process)
          };
          break
       fi;
next:
       got = 0; turn = 0; mine = 0; seen = 0; loaded = 0; floor = 0; me = 0
    :: begun == OWNERS -> break
    od
}

/* PostgresBackend.release(), for another process's lock */
inline take_away(o) {
    if
    :: atomic {
           /* Left to its keeper, which finds the note: RENEW. */
           row_of == o && key_count > 0 ->
           take(o); noted = o
       }
    :: atomic {
           !(row_of == o && key_count > 0) -> printf("the lock isn't owner %d's any more\n", o)
       }
    fi
}

inline force() {
#ifdef FREE_BEFORE
    take_away(victim);
#endif
#ifndef FREE_WITHOUT_LIFT
    lift(victim, 0);
#endif
#ifndef FREE_BEFORE
    take_away(victim);
#endif
    victim = 0; lifted = 0
}

proctype World() {
    byte victim, lifted;

end:
    do
    :: atomic {
           /* The server's idle limit, a restart, an administrator. */
           losses > 0 && key_count > 0 -> losses--;
           printf("the session of process %d ends\n", key_of); end_session(key_of)
       }
    :: atomic {
           noted != 0 && (hold[1] == noted || hold[2] == noted) ->
           printf("the keeper of owner %d gives the lock back\n", noted);
           if
           :: hold[1] == noted && !ended[1] -> hold[1] = 0; unlock(1, noted)
           :: hold[2] == noted && !ended[2] -> hold[2] = 0; unlock(2, noted)
           :: else
           fi;
           noted = 0
       }
    :: atomic { forces > 0 && key_count > 0 && row_of != 0 -> forces--; victim = row_of };
       force()
    od
}

init {
    atomic {
        run Client(1);
        run Client(1);
        run Client(2);
        run World()
    }
}
