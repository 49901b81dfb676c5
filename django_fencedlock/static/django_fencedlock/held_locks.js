'use strict';
// Refreshes the list of held locks in place: scroll, selection, focus and what is being typed stay.
{
    const EVERY = 5000;
    const REMEMBERED = 'fencedlock-paused';

    const start = function() {
        const control = document.getElementById('fencedlock-refresh');
        if (!control) {
            return;
        }
        const button = control.querySelector('button');
        const status = control.querySelector('span');
        let paused = localStorage.getItem(REMEMBERED) === 'yes';
        let last = new Date();

        const show = function() {
            button.setAttribute('aria-pressed', String(paused));
            button.textContent = paused ? button.dataset.resume : button.dataset.pause;
            status.textContent = paused ? status.dataset.paused : status.dataset.live;
        };

        const put = function(fresh, selector) {
            const here = document.querySelector(selector);
            const there = fresh.querySelector(selector);
            if (here && there) {
                here.replaceWith(there);
            }
        };

        const boxes = (page) => Array.from(page.querySelectorAll('#result_list .action-select'));

        // The admin's own script counts and toggles the boxes that were there at first. Those move
        // to the fresh rows, and keep what is selected; the others are seen to here.
        const putRows = function(fresh) {
            const known = new Map(boxes(document).map((box) => [box.value, box]));
            for (const box of boxes(fresh)) {
                const old = known.get(box.value);
                if (old) {
                    known.delete(box.value);
                    box.closest('tr').classList.toggle('selected', old.checked);
                    box.replaceWith(old);
                }
            }
            known.forEach(function(box) {
                box.checked = false;
            });
            const rows = fresh.querySelectorAll('#result_list tbody > tr');
            document.querySelector('#result_list tbody').replaceChildren(...rows);
            count();
        };

        const count = function() {
            const counter = document.querySelector('.action-counter');
            const toggle = document.getElementById('action-toggle');
            if (!counter || !toggle) {
                return;
            }
            const all = boxes(document);
            const sel = all.filter((box) => box.checked).length;
            const text = ngettext('%(sel)s of %(cnt)s selected', '%(sel)s of %(cnt)s selected', sel);
            counter.textContent = interpolate(text, {sel: sel, cnt: all.length}, true);
            toggle.checked = sel > 0 && sel === all.length;
        };

        const watchBoxes = function() {
            const table = document.getElementById('result_list');
            if (!table) {
                return;
            }
            // On the table, so that the admin's own script has had its turn.
            table.addEventListener('change', count);
            table.addEventListener('click', function(event) {
                if (event.target.id === 'action-toggle') {
                    for (const box of boxes(document)) {
                        box.checked = event.target.checked;
                        box.closest('tr').classList.toggle('selected', box.checked);
                    }
                    count();
                }
            });
        };

        const focusIn = function(list) {
            const active = document.activeElement;
            if (!list || !list.contains(active)) {
                return null;
            }
            return active.classList.contains('action-select') ?
                `#result_list .action-select[value="${CSS.escape(active.value)}"]` :
                `#result_list a[href="${CSS.escape(active.getAttribute('href') || '')}"]`;
        };

        const replace = function(fresh) {
            const list = document.getElementById('result_list');
            if (Boolean(list) !== Boolean(fresh.getElementById('result_list'))) {
                // From none to some, or the other way: the page has another shape.
                location.reload();
                return;
            }
            const focused = focusIn(list);
            if (list) {
                putRows(fresh);
            }
            put(fresh, '#fencedlock-notices');
            put(fresh, '.paginator');
            if (focused) {
                const again = document.querySelector(focused);
                if (again) {
                    again.focus({preventScroll: true});
                }
            }
        };

        const refresh = async function() {
            if (paused || document.hidden) {
                return;
            }
            try {
                const answer = await fetch(location.href, {credentials: 'same-origin', redirect: 'error'});
                if (!answer.ok) {
                    throw new Error(answer.status);
                }
                replace(new DOMParser().parseFromString(await answer.text(), 'text/html'));
                last = new Date();
                show();
            } catch (error) {
                status.textContent = `${status.dataset.failed} ${last.toLocaleTimeString()}.`;
            }
        };

        button.addEventListener('click', function() {
            paused = !paused;
            localStorage.setItem(REMEMBERED, paused ? 'yes' : 'no');
            show();
            refresh();
        });
        control.hidden = false;
        watchBoxes();
        show();
        // One after the other: a slow server isn't asked again before it has answered.
        const next = () => setTimeout(async function() {
            await refresh();
            next();
        }, EVERY);
        next();
    };

    if (document.readyState === 'loading') {
        document.addEventListener('DOMContentLoaded', start);
    } else {
        start();
    }
}
