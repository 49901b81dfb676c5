/*
 * What the models of all lock services have in common: the fence, one protected row, and the
 * promises. Included by each of them.
 *
 * A grant is an owner (`me`, a uuid in the code) with a token. Whatever happens between two steps
 * of a client may take any time: a client is paused wherever another process takes a step.
 *
 * PROPERTY says which promise is looked at; a model stops where that one is broken.
 */
#define ALL 0
/* No token is handed out twice. */
#define UNIQUE 1
/* Who asks after another one got his answer gets a higher token. */
#define RISING 2
/* Tokens rise in the order in which the lock service gave the lock, unless it forgot any. */
#define ORDER 3
/* The lock service gives a lock to nobody while it runs for another owner. */
#define EXCLUSION 4
/* No write commits after a newer grant. */
#define STALE 5
/* No write goes over one that its writer hasn't read. */
#define LOST_UPDATE 6
/* Who has the newest grant, and the lock, isn't refused a write. */
#define DENIED 7
/* Nothing of a holder who was forced out commits, from the moment that his lock is free. */
#define FORCED 8
/* Nor is his lease renewed. */
#define RETAKEN 9
/* A lease that has expired isn't renewed once another holder has come. */
#define OVERTAKEN 10

#ifndef PROPERTY
#define PROPERTY ALL
#endif

#define BROKEN(promise, text) \
    if \
    :: (PROPERTY == ALL || PROPERTY == promise) -> \
       printf(text); assert(false) \
    :: else \
    fi

/* The row of `Fence`: token and owner of the newest grant; owner 0 is nobody. */
byte fence_token, fence_owner;
/* How many open transactions have it locked FOR SHARE; whoever records a grant can't, then. */
byte pins;

/* The protected row: its fence column, how often it was written, and who has it locked. */
byte row_fence, row_writes, row_lock;

/* Owners are made one after the other; `begun` is the last. */
byte begun;
/* How many crashes, late requests, forced releases and losses of data there may be yet. */
byte crashes = CRASHES, late = LATE, forces = FORCES;
/* By owner: whether he gave his lock back, or is dead. */
bool given_back[OWNERS + 1], gone[OWNERS + 1];
/*
 * By owner: how many grants there were when his fence was lifted, if somebody was told that his lock
 * was taken from him. A request of his that comes twice may get him another one after that.
 */
byte taken[OWNERS + 1];
/* Whether it was, and the lock service hasn't given it to him anew, for a request that came late. */
bool is_out[OWNERS + 1];
#ifdef UNFENCED
/* By owner: whether an unfenced holder has come since his grant. */
bool overtaken[OWNERS + 1];
#endif
/* By owner: the token of his lease. */
byte token_of[OWNERS + 1];

/* Ghosts: known to nobody in the model. */
byte serial;               /* grants so far, as the promises count them */
byte serial_of[OWNERS + 1];
short handed_out;          /* a bit for each token that a caller has got */
#ifdef WITH_ORDER
byte given;                /* locks given by the service so far */
byte last_given;           /* which of them the present one is */
byte given_of[OWNERS + 1];
#endif
byte completed;            /* the highest token whose holder has his answer */
byte running;              /* whose lease runs, by the word of the lock service */
byte at_lift;              /* grants when a fence was lifted last */
byte forced_out;           /* grants up to this serial were forced out */

inline give(o) {
    /* The lock service gives the lock to o, who may never hear of it. */
    if
    :: running != 0 && running != o ->
       BROKEN(EXCLUSION, "BROKEN: the lock was given to another while it ran\n")
    :: else
    fi;
    running = o; is_out[o] = false
#ifdef UNFENCED
    ; overtaken[o] = false
#endif
#ifdef WITH_ORDER
    ; given++;
    last_given = given;
    turn = given
#endif
}

inline recorded(o) {
    /* From here on o's grant is the newest. */
    serial++
}

inline hand_out(o, t) {
    /* The caller's code gets the lease; the token is final. */
    token_of[o] = t;
    serial_of[o] = mine;
    printf("owner %d has the lock with token %d\n", o, t);
    if
    :: handed_out & (1 << t) -> BROKEN(UNIQUE, "BROKEN: a token was handed out twice\n")
    :: else
    fi;
    handed_out = handed_out | (1 << t);
    if
    :: t <= floor -> BROKEN(RISING, "BROKEN: a token isn't above those that were known before\n")
    :: else
    fi;
#ifdef WITH_ORDER
    given_of[o] = turn;
    other = 1;
    do
    :: other <= OWNERS ->
       if
       :: given_of[other] != 0 && other != o && no_losses &&
          ((token_of[other] < t && given_of[other] > turn) ||
           (token_of[other] > t && given_of[other] < turn)) ->
          BROKEN(ORDER, "BROKEN: tokens aren't in the order of the grants\n")
       :: else
       fi;
       other++
    :: else -> break
    od;
    other = 0;
#endif
    if
    :: t > completed -> completed = t
    :: else
    fi
}

/*
 * How a write is refused. models/writes.py row_condition(), fences/pins.py pin_sql().
 *
 * NO_FENCE    nothing is checked
 * HIGH_WATER  fence <= T, a statement over many rows in mode "high_water"
 * NO_SHARE    as ours, but the fence's row isn't locked
 * (ours)      fence IN (loaded, T) AND EXISTS (SELECT ... token = T AND owner = O FOR SHARE)
 */
#if defined(NO_FENCE) || defined(HIGH_WATER)
#define IS_NEWEST(o) true
#define PIN
#define UNPIN
#elif defined(NO_SHARE)
#define IS_NEWEST(o) (fence_token == token_of[o] && fence_owner == o)
#define PIN
#define UNPIN
#else
#define IS_NEWEST(o) (fence_token == token_of[o] && fence_owner == o)
#define PIN pins++
#define UNPIN pins--
#endif

#if defined(NO_FENCE)
#define ROW_MAY_BE_WRITTEN(o) true
#elif defined(HIGH_WATER)
#define ROW_MAY_BE_WRITTEN(o) (row_fence <= token_of[o])
#else
#define ROW_MAY_BE_WRITTEN(o) (row_fence == loaded || row_fence == token_of[o])
#endif

inline commit(o) {
    printf("owner %d writes under token %d\n", o, token_of[o]);
    if
    :: serial_of[o] < serial -> BROKEN(STALE, "BROKEN: a write committed after a newer grant\n")
    :: else
    fi;
    if
    :: seen != row_writes -> BROKEN(LOST_UPDATE, "BROKEN: a write went over one that wasn't read\n")
    :: else
    fi;
    if
    :: serial_of[o] <= forced_out || serial_of[o] <= taken[o] ->
       BROKEN(FORCED, "BROKEN: one who was forced out has written\n")
    :: else
    fi;
    row_writes++;
    row_fence = token_of[o]
}

inline refuse(o) {
    printf("owner %d is refused\n", o);
    if
    :: HAS_LOCK(o) && serial_of[o] == serial && no_losses && serial_of[o] > forced_out ->
       BROKEN(DENIED, "BROKEN: the holder is refused though nobody came after\n")
    :: else
    fi;
    goto written
}

/* A write ends in `refused`, where it was refused, or in `written`. */
inline write(o) {
    if
    :: true ->
       /* Invoice.objects.get(...): loaded is the fence that it is read with. */
       d_step { seen = row_writes; loaded = row_fence };
       printf("owner %d reads the row\n", o);
       /* The UPDATE reaches the server: the subquery of its condition pins the fence. */
       atomic {
           if
           :: IS_NEWEST(o) -> PIN
           :: else -> refuse(o)
           fi
       }
    :: true ->
       /* lease.atomic(): fences/pinning.py pinned_atomic(), is_newest(); then it reads. */
       atomic {
           if
           :: IS_NEWEST(o) -> PIN
           :: else -> refuse(o)
           fi
       };
       d_step { seen = row_writes; loaded = row_fence };
       printf("owner %d reads the row, in a transaction\n", o)
    fi;
    /* The UPDATE waits for the row; its condition is looked at with the newest version. */
    atomic {
        row_lock == 0;
        if
        :: ROW_MAY_BE_WRITTEN(o) -> row_lock = o
        :: else -> UNPIN; refuse(o)
        fi
    };
    atomic {
        if
        :: true ->
           commit(o)
        :: crashes > 0 ->
           /* Its session ends, or was silent for longer than the ttl (pins.py _BE_PATIENT). */
           crashes--; printf("the transaction of owner %d is rolled back\n", o)
        fi;
        row_lock = 0;
        UNPIN
    };
written:
    skip
}

inline take(o) {
    taken[o] = (lifted != 0 -> at_lift : serial); is_out[o] = true;
    printf("owner %d is forced out\n", o)
}

/* A renewal that the lock service didn't refuse. */
inline renewed(o) {
    if
    :: is_out[o] ->
       BROKEN(RETAKEN, "BROKEN: one who was forced out had his lease renewed\n")
    :: else
    fi
#ifdef UNFENCED
    ;
    if
    :: overtaken[o] && no_losses ->
       BROKEN(OVERTAKEN, "BROKEN: a lease was renewed after another holder had come\n")
    :: else
    fi
#endif
}

/*
 * Releasing by force: releasing.py force_release(). A person looks who has the lock; the fence is
 * lifted, then the lock is freed, if it is still that owner's.
 *
 * FREE_WITHOUT_LIFT  the lock is freed, and the fence left as it is
 * FREE_BEFORE        it is freed first
 * NOT_FREED          the fence is lifted, and the lock left as it is
 *
 * fences/revoking.py _RAISE: told is the token that the lock service says, which may not be
 * recorded yet. Waits for whoever has the fence locked.
 */
inline lift(o, told) {
    atomic {
        pins == 0;
        if
        :: fence_owner == o || fence_token < told ->
           if
           :: fence_owner == o -> forced_out = serial
           :: else
           fi;
           if
           :: fence_token < told -> fence_token = told + 1
           :: else -> fence_token++
           fi;
           fence_owner = 0
        :: else
        fi;
        lifted = fence_token; at_lift = serial;
        printf("the fence is lifted to %d, above owner %d\n", lifted, o)
    }
}

/* Choose any owner that has begun. */
inline any_owner() {
    who = 1;
    do
    :: who < begun -> who++
    :: break
    od
}
