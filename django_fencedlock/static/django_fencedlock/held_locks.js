'use strict';
// Refresh the list of held locks in place. Keep scroll position, selection, focus and typed text.
{
    const EVERY = 5000;
    const STORAGE_KEY = 'fencedlock-paused';

    // The admin's script uses the checkboxes that existed when the page was loaded.
    const countCurrentBoxes = function() {
        const actions = window.Actions;
        if (actions && !actions.countsCurrentBoxes) {
            window.Actions = function(boxes, options) {
                const current = document.getElementsByClassName('action-select');
                current.forEach = Array.prototype.forEach;
                actions(current, options);
            };
            window.Actions.countsCurrentBoxes = true;
        }
    };

    const remembered = function() {
        try {
            return localStorage.getItem(STORAGE_KEY) === 'yes';
        } catch {
            return false;
        }
    };

    const remember = function(paused) {
        try {
            localStorage.setItem(STORAGE_KEY, paused ? 'yes' : 'no');
        } catch {
            // Storage is disabled: the next page starts unpaused.
        }
    };

    const say = function(element, text) {
        // Screen readers announce a text again if it is set again, even unchanged.
        if (element.textContent !== text) {
            element.textContent = text;
        }
    };

    const put = function(here, there) {
        if (here && there && here.innerHTML !== there.innerHTML) {
            here.innerHTML = there.innerHTML;
        }
    };

    const keyOf = (row) => row.querySelector('.field-lock_name a')?.getAttribute('href');

    const rowsOf = (table) => Array.from(table.tBodies[0].rows);

    const update = function(mine, fresh) {
        Array.from(mine.cells).forEach(function(cell, place) {
            if (!cell.classList.contains('action-checkbox')) {
                put(cell, fresh.cells[place]);
            }
        });
    };

    // Remaining rows keep their elements, and so their checkboxes and focus.
    const merge = function(table, freshTable) {
        const mine = new Map(rowsOf(table).map((row) => [keyOf(row), row]));
        const fresh = rowsOf(freshTable);
        const staying = new Set(fresh.map(keyOf));
        let changed = false;
        mine.forEach(function(row, key) {
            if (!staying.has(key)) {
                row.remove();
                changed = true;
            }
        });
        const body = table.tBodies[0];
        let place = body.firstElementChild;
        fresh.forEach(function(row) {
            const old = mine.get(keyOf(row));
            if (!old) {
                body.insertBefore(document.adoptNode(row), place);
                changed = true;
            } else {
                update(old, row);
                if (old === place) {
                    place = place.nextElementSibling;
                } else {
                    body.insertBefore(old, place);
                }
            }
        });
        return changed;
    };

    const recount = function(fresh) {
        const counter = document.querySelector('span.action-counter');
        const across = document.querySelector('input.select-across');
        if (!counter || (across && across.value === '1')) {
            return;
        }
        const there = fresh.querySelector('span.action-counter');
        if (there) {
            counter.dataset.actionsIcnt = there.dataset.actionsIcnt;
        }
        // Makes the admin's script count the selection.
        window.dispatchEvent(new Event('pageshow'));
    };

    // From no locks to some, or back: add or remove the whole list.
    const exchange = function(fresh) {
        const footer = document.querySelector('#changelist-form .changelist-footer, #changelist-form .paginator');
        ['#changelist-form .actions', '#changelist-form .results'].forEach(function(selector) {
            document.querySelector(selector)?.remove();
            const there = fresh.querySelector(selector);
            if (there) {
                footer.before(document.adoptNode(there));
            }
        });
        const boxes = document.querySelectorAll('tr input.action-select');
        if (boxes.length && window.Actions) {
            window.Actions(boxes);
        }
    };

    const replace = function(fresh) {
        const here = document.getElementById('result_list');
        const there = fresh.getElementById('result_list');
        const focused = document.activeElement?.getAttribute('href');
        put(document.getElementById('fencedlock-notices'), fresh.getElementById('fencedlock-notices'));
        put(document.querySelector('.paginator'), fresh.querySelector('.paginator'));
        if (Boolean(here) !== Boolean(there)) {
            exchange(fresh);
        } else if (here && merge(here, there)) {
            recount(fresh);
        }
        if (focused && !document.activeElement?.hasAttribute('href')) {
            const again = `#changelist-form a[href="${CSS.escape(focused)}"]`;
            document.querySelector(again)?.focus({preventScroll: true});
        }
    };

    const marksText = function() {
        const selection = getSelection();
        const form = document.getElementById('changelist-form');
        return !selection.isCollapsed && selection.containsNode(form, true);
    };

    const start = function() {
        countCurrentBoxes();
        const control = document.getElementById('fencedlock-refresh');
        if (!control) {
            return;
        }
        const button = control.querySelector('button');
        const status = control.querySelector('span');
        let paused = remembered();
        let last = new Date();
        let busy = false;

        const show = function() {
            say(button, paused ? button.dataset.resume : button.dataset.pause);
            say(status, paused ? status.dataset.paused : status.dataset.live);
        };

        const refresh = async function() {
            if (paused || busy || document.hidden || marksText()) {
                return;
            }
            busy = true;
            const failed = () => say(status, `${status.dataset.failed} ${last.toLocaleTimeString()}.`);
            // Report a hanging server before its answer arrives.
            const late = setTimeout(failed, EVERY);
            try {
                const answer = await fetch(location.href, {credentials: 'same-origin', redirect: 'error'});
                if (!answer.ok) {
                    throw new Error(answer.status);
                }
                const page = await answer.text();
                if (paused || marksText()) {
                    return;
                }
                replace(new DOMParser().parseFromString(page, 'text/html'));
                last = new Date();
                show();
            } catch {
                failed();
            } finally {
                clearTimeout(late);
                busy = false;
            }
        };

        button.addEventListener('click', function() {
            paused = !paused;
            remember(paused);
            show();
            refresh();
        });
        document.addEventListener('visibilitychange', refresh);
        control.hidden = false;
        show();
        // Not setInterval(): a slow server gets no second request before it has answered.
        const next = () => setTimeout(async function() {
            await refresh();
            next();
        }, EVERY);
        next();
    };

    // The admin's script may be loaded before this one, or after it.
    countCurrentBoxes();
    if (document.readyState === 'loading') {
        document.addEventListener('DOMContentLoaded', start);
    } else {
        start();
    }
}
